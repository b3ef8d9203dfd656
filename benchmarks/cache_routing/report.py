"""Means over the seeds, how ours compares with the best of the others, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cache_routing.runs import FIGURES
from kllm.simulation.page_style import CSS

OURS = "cache-aware"
MORE_CSS = """
td.bar{width:26%;min-width:110px}td.bar s{display:block;height:11px;border-radius:2px;background:var(--a);opacity:.75}
tr.ours td{font-weight:600}tr.ours td.bar s{opacity:1}td.miss{color:var(--bad)}
"""


def means(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    mean = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in FIGURES}
    return {
        "hit_rate": mean["hit_rate"],
        "ttft_s": {"mean": mean["ttft_mean_s"], "p95": mean["ttft_p95_s"]},
        "goodput_rps": mean["goodput_rps"],
        "slo_share": mean["slo_share"],
        "tpot_p95_s": mean["tpot_p95_s"],
        "seeds": len(runs),
    }


def against_best(by_router: dict[str, Any]) -> dict[str, float] | None:
    """Ours over the best of the others, each figure on its own: goodput (more is better) and times to first token
    (less is better); None where ours or all others are missing."""
    others = [one for router, one in by_router.items() if router != OURS]
    if OURS not in by_router or not others:
        return None
    ours = by_router[OURS]
    return {
        "goodput": round(ours["goodput_rps"] / max(one["goodput_rps"] for one in others), 4),
        "ttft_mean": round(ours["ttft_s"]["mean"] / min(one["ttft_s"]["mean"] for one in others), 4),
        "ttft_p95": round(ours["ttft_s"]["p95"] / min(one["ttft_s"]["p95"] for one in others), 4),
    }


def by_policy(by_load: dict[str, Any]) -> dict[str, Any]:
    """Figures of each policy: at the load nearest to 0.9, and, where there are several, at each in `by_load`."""
    load = min(by_load, key=lambda load: abs(float(load) - 0.9))
    found = {policy: {"load": float(load), **one} for policy, one in by_load[load].items()}
    if len(by_load) > 1:
        for policy, one in found.items():
            one["by_load"] = {load: policies[policy] for load, policies in by_load.items() if policy in policies}
    return found


def show(title: str, by_load: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("load", "router", "hit rate", "TTFT mean, s", "p95", "goodput, 1/s", "in SLO", "seeds"):
        table.add_column(column, justify="right" if column not in ("load", "router") else "left")
    for load, by_router in by_load.items():
        for router, one in by_router.items():
            table.add_row(load, router, *_cells(one))
    console.print(table)


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    waits = one["ttft_s"]
    return (
        f"{one['hit_rate']:.1%}",
        f"{waits['mean']:.2f}",
        f"{waits['p95']:.2f}",
        f"{one['goodput_rps']:.2f}",
        f"{one['slo_share']:.1%}",
        str(one["seeds"]),
    )


HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routers compared</title>
<meta name="viewport" content="width=device-width"><style>{CSS}{MORE_CSS}</style></head><body><main>
<h1>Routers compared</h1><p class="lead">GLM-5.2 on 8 H200 an instance, virtual time. A load is a share of what the
fleet could do if requests were dealt out in turn. Goodput: share of requests within TTFT 4 s and TPOT 60 ms, of the
rate at which they come. Means over the seeds.</p>"""
FOOT = "<footer>python benchmarks/routing.py --matrix</footer></main></body></html>"


def write_page(kept: dict[str, Any], path: Path) -> None:
    """kept: the content of routing.json."""
    comparisons = {title: part for title, part in kept.items() if "by_load" in part}
    body = "".join(_section(title, part) for title, part in comparisons.items())
    path.write_text(f"{HEAD}{_verdicts(comparisons)}{body}{FOOT}\n", encoding="utf-8")


def _verdicts(comparisons: dict[str, Any]) -> str:
    """Ours over the best of the others, in one table."""
    rows = "".join(
        f"<tr><td>{escape(title)}</td><td>{load}</td>{_ratios(ratios)}</tr>"
        for title, load, ratios in _compared(comparisons)
    )
    return (
        "<section class='card'><h2>Ours over the best of the others</h2><p class='note'>Each figure against whichever "
        "router is best at it. Goodput: at least 0.99 is wanted everywhere, at least 1 at 0.9; times to first token: "
        "less is better.</p><div class='scroll'><table><tr><th>trace, fleet</th><th>load</th><th>goodput</th>"
        f"<th>mean TTFT</th><th>p95 TTFT</th></tr>{rows}</table></div></section>"
    )


def _compared(comparisons: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    for title, part in comparisons.items():
        for load, by_router in part["by_load"].items():
            ratios = against_best(by_router)
            if ratios is not None:
                yield title, load, ratios


def _ratios(ratios: dict[str, float]) -> str:
    missed = {
        "goodput": ratios["goodput"] < 0.99,
        "ttft_mean": ratios["ttft_mean"] > 1.01,
        "ttft_p95": ratios["ttft_p95"] > 1.01,
    }
    return "".join(f"<td{' class=miss' if missed[name] else ''}>{ratios[name]:.3f}</td>" for name in missed)


def _section(title: str, part: dict[str, Any]) -> str:
    tables = "".join(_table(load, by_router) for load, by_router in part["by_load"].items())
    return f"<section class='card'><h2>{escape(title)}<small>{part['requests']} requests</small></h2>{tables}</section>"


def _table(load: str, by_router: dict[str, Any]) -> str:
    most = max(one["goodput_rps"] for one in by_router.values()) or 1.0
    rows = ""
    for router, one in by_router.items():
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(one))
        bar = f"<td class='bar'><s style='width:{one['goodput_rps'] / most:.1%}'></s></td>"
        rows += f"<tr{' class=ours' if router == OURS else ''}><td>{router}</td>{cells}{bar}</tr>"
    return (
        f"<h3>Load {load}</h3><div class='scroll'><table><tr><th>router</th><th>hit rate</th><th>mean TTFT, s</th>"
        f"<th>p95</th><th>goodput, 1/s</th><th>in SLO</th><th>seeds</th><th>goodput</th></tr>{rows}</table></div>"
    )
