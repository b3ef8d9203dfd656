"""One self-contained HTML page about a simulated run: nothing is loaded from anywhere, and it reads without script."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from kllm.simulation import formats
from kllm.simulation.latency_charts import latency_cdf, ttft_by_prompt
from kllm.simulation.page_style import CSS, SCRIPT
from kllm.simulation.results import FleetResult
from kllm.simulation.series import timelines
from kllm.simulation.slo_charts import slo_charts
from kllm.simulation.timeline_charts import MOST_SMALL, fleet_charts, instance_charts

_MOST_SETTINGS = 100
_MOST_LINES = 300  # notes; faults; instances of the table
_LATENCIES = {
    "ttft_s": "Time to first token (TTFT)",
    "tpot_s": "Time per output token (TPOT)",
    "e2e_s": "Whole request",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def render_page(result: FleetResult, summary: dict[str, Any]) -> str:
    """The page of a run; `summary` is that of `summarise`. Its size has a bound, however long the run."""
    title = _title(summary)
    parts = [
        f"<h1>{escape(title)}</h1><p class=lead>{escape(_lead(summary))}</p>",
        _settings(summary["settings"]),
        _lines("Notes", summary["notes"], "how the trace was scaled, and what the figures leave out", opened=True),
        _lines("Faults", summary["faults"], "injected on purpose; marked red on the timelines", opened=False),
        "<h2>Key figures</h2>" + _tiles(summary),
        _lines("Not completed", formats.reasons(summary), "why requests ended otherwise", opened=True),
        _latency_table(summary),
        _timelines(result),
        _latencies(result, summary),
        _tiers(summary),
        _instances(summary["instances"]),
        _footer(summary),
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _title(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    named = [formats.text(settings[key]) for key in ("model", "hardware") if settings.get(key) is not None]
    return "Simulated fleet" + (f": {' on '.join(named)}" if named else "")


def _lead(summary: dict[str, Any]) -> str:
    instances = len(summary["instances"])
    trace = summary["settings"].get("trace")
    return (
        f"{summary['requests']:,} requests{f' of {formats.text(trace)}' if trace else ''} over "
        f"{formats.seconds(summary['simulated_s'])} on {instances:,} instance{'s' if instances != 1 else ''}, "
        f"{summary['gpus']:,} GPUs"
    )


def _settings(settings: dict[str, Any]) -> str:
    if not settings:
        return ""
    shown = list(settings.items())[:_MOST_SETTINGS]
    rows = "".join(
        f"<div><dt>{escape(formats.text(str(name)).replace('_', ' '))}</dt><dd>{escape(formats.text(value))}</dd></div>"
        for name, value in shown
    )
    return f'<section class=card><dl class="settings">{rows}</dl></section>'


def _lines(title: str, lines: list[str], meaning: str, *, opened: bool) -> str:
    if not lines:
        return ""
    shown = [formats.text(line) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"and {len(lines) - _MOST_LINES:,} more")
    items = "".join(f"<li>{escape(line)}</li>" for line in shown)
    return (
        f"<details class=card{' open' if opened else ''}><summary><b>{title}</b> ({len(lines):,}) "
        f"<span class=note>{escape(meaning)}</span></summary><ul>{items}</ul></details>"
    )


def _tiles(summary: dict[str, Any]) -> str:
    return f"<section class=tiles>{''.join(_tile(*tile) for tile in _key_figures(summary))}</section>"


def _tile(name: str, value: str, meaning: str, bad: bool = False) -> str:
    css = "tile bad" if bad else "tile"
    return (
        f'<div class="{css}"><span>{escape(name)}</span><strong>{escape(value)}</strong>'
        f"<small>{escape(meaning)}</small></div>"
    )


def _key_figures(summary: dict[str, Any]) -> Iterable[tuple[str, str, str] | tuple[str, str, str, bool]]:
    """(name, figure, what it means, whether it is alarming)."""
    others = [f"{count:,} {name}" for name, count in summary["endings"].items() if count and name != "completed"]
    retried = f"{summary['retried']:,} retried on another instance" if summary["retried"] else ""
    rest = ", ".join(filter(None, [*others, retried])) or "no errors, none refused, none aborted"
    completed = summary["completed"] / summary["requests"] if summary["requests"] else 1.0
    yield (
        "Completed",
        formats.share(completed),
        f"{summary['completed']:,} of {summary['requests']:,}; {rest}",
        bool(others),
    )
    if limits := formats.limits(summary["slo"]):
        yield (
            "Goodput",
            f"{formats.count(summary['goodput_rps'])} req/s",
            f"{formats.share(summary['slo']['share'])} of all requests completed with {limits}",
        )
    else:
        yield "Requests", f"{formats.count(summary['requests_per_s'])} req/s", "completed a second; no SLO was given"
    for key, name, meaning in (("ttft_s", "TTFT", "wait for the first token"), ("tpot_s", "TPOT", "per later token")):
        figures = summary[key]
        tail = f"p95 {formats.seconds(figures['p95'])}, p99 {formats.seconds(figures['p99'])}"
        yield f"{name}, median", formats.seconds(figures["p50"]), f"{meaning}; {tail}"
    yield (
        "Output",
        f"{formats.count(summary['output_tokens_per_s'])} tok/s",
        f"{formats.count(summary['output_tokens_per_s_per_gpu'])} a GPU; "
        f"{formats.count(summary['total_tokens_per_s'])} with prompts",
    )
    yield (
        "Prefix hit rate",
        formats.share(sum(summary["hit_rate"].values())),
        f"of {formats.count(summary['prompt_tokens'])} prompt tokens were cached"
        + (f": {hits}" if (hits := formats.hits(summary)) else " in the instances' memory"),
    )
    busy = [row["busy"] for row in summary["instances"]]
    spread = f"; {formats.share(min(busy))} to {formats.share(max(busy))} by instance" if len(busy) > 1 else ""
    yield "Busy", formats.share(summary["utilisation"]), f"of the time a step was computing{spread}"
    if cost := summary["cost"]:
        yield (
            "Cost",
            formats.dollars(cost["per_million_output_tokens"]),
            f"per million output tokens; {formats.dollars(cost['per_million_tokens'])} with prompts, "
            f"at {formats.dollars(cost['per_gpu_hour'])} a GPU-hour",
        )
    yield from _load_tile(summary)
    if fairness := formats.fairness(summary):
        yield "Gave way", f"{summary['yields'] + summary['overtakes']:,} times", fairness


def _load_tile(summary: dict[str, Any]) -> Iterable[tuple[str, str, str, bool]]:
    load, native = summary["load"], summary["trace_load"]
    shown = native if load is None else load
    if shown is not None:
        yield "Load", formats.share(shown), f"arrivals: {formats.load(load, native)}", shown > 1


def _latency_table(summary: dict[str, Any]) -> str:
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = "".join(
        f"<tr><td>{title}</td>"
        + "".join(f"<td>{formats.seconds(figures[column])}</td>" for column in _COLUMNS)
        + "</tr>"
        for title, figures in formats.latency_rows(summary, _LATENCIES)
    )
    caption = "<h3>Latency of completed requests</h3>"
    return (
        f"<section class=card>{caption}<div class=scroll><table><tr><th></th>{head}</tr>{rows}</table></div></section>"
    )


def _timelines(result: FleetResult) -> str:
    """All charts over time have one time axis, so that they line up."""
    lines = timelines(result.outcomes, result.samples, result.simulated_s, MOST_SMALL)
    drawn = [*fleet_charts(lines, result.faults), *slo_charts(result.slo, lines.intervals.end)]
    charts = "".join(chart.html() for chart in drawn)
    small = "".join(chart.html() for chart in instance_charts(lines, result.faults))
    head = f"each point covers {formats.round_seconds(lines.intervals.width)}"
    if small:
        small = (
            "<section class='card time'><h3>KV cache in use, by instance</h3>"
            "<p class=note>% of its blocks that running requests hold, over simulated time; red: out of service</p>"
            f"<div class=small>{small}</div></section>"
        )
    return (
        f"<h2>Over simulated time <small class=note>{head}</small></h2>"
        f"<section class='card time'>{charts}</section>{small}"
    )


def _latencies(result: FleetResult, summary: dict[str, Any]) -> str:
    charts = [
        latency_cdf("Time to first token", result, "ttft_s", summary["ttft_s"], summary["slo"]["ttft_ms"]),
        latency_cdf("Time per output token", result, "tpot_s", summary["tpot_s"], summary["slo"]["tpot_ms"]),
    ]
    drawn = "".join(chart.html() for chart in charts if chart is not None)
    scatter = ttft_by_prompt(result.outcomes, summary["slo"]["ttft_ms"])
    if not drawn:
        return ""
    below = f"<section class=card>{scatter.html()}</section>" if scatter is not None else ""
    return f"<h2>Latency</h2><section class='card pair'>{drawn}</section>{below}"


def _tiers(summary: dict[str, Any]) -> str:
    rows = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in formats.tiers(summary))
    if not rows:
        return ""
    meaning = "L1 is the accelerators' memory, L2 the host's, L3 the fleet's store; all instances together"
    return (
        f'<h2>Cache tiers</h2><section class=card><p class=note>{meaning}</p><dl class="settings">{rows}</dl></section>'
    )


def _instances(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    names = (
        "instance",
        "up",
        "busy",
        "running",
        "peak",
        "waiting",
        "peak",
        "KV used",
        "peak",
        "rows/step",
        "tokens/step",
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row))}</tr>" for row in rows[:_MOST_LINES])
    more = f"<p class=note>and {len(rows) - _MOST_LINES:,} more</p>" if len(rows) > _MOST_LINES else ""
    return (
        "<h2>Instances</h2><section class=card><p class=note>running, waiting and KV: means over the time it was up, "
        f"and peaks</p><div class=scroll><table><tr>{head}</tr>{body}</table></div>{more}</section>"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["instance"]),
        formats.share(row["up"]),
        formats.share(row["busy"]),
        formats.count(row["running"]),
        formats.count(row["running_peak"]),
        formats.count(row["waiting"]),
        formats.count(row["waiting_peak"]),
        formats.share(row["kv_usage"]),
        formats.share(row["kv_usage_peak"]),
        formats.count(row["step_rows"]),
        formats.count(row["step_tokens"]),
    ]


def _footer(summary: dict[str, Any]) -> str:
    speed = summary["simulated_s"] / summary["wall_s"] if summary["wall_s"] else 0.0
    counted = ("steps", "restarts", "preemptions", "yields", "overtakes")
    told = ", ".join(f"{name}: {summary[name]:,}" for name in counted)
    return (
        f"<footer>{told.capitalize()}. Simulated {formats.seconds(summary['simulated_s'])} "
        f"in {formats.seconds(summary['wall_s'])}, {formats.count(speed)} times real time. "
        f"Decisions {escape(summary['decision_hash'])}: the same settings "
        "and seed give the same hash.</footer>"
    )
