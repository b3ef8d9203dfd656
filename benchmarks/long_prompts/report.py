"""The figures as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.long_prompts.mixed import FIGURES, REPORTED
from benchmarks.long_prompts.planning import AIM_MS, MOST_MS
from benchmarks.long_prompts.virtual import MOST_STRETCH


def print_figures(kept: dict[str, Any], console: Console) -> None:
    """Of every part that has been measured."""
    for part, show in _SHOW.items():
        if part in kept:
            console.print(show(kept[part]))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _planning(figures: dict[str, Any]) -> Table:
    title = f"Planning with {figures['running']} running and {figures['waiting']:,} waiting"
    table = _table(f"{title}, ms (at most {MOST_MS}, aim {AIM_MS})", "", "mean", "median", "longest")
    for name, one in figures["situations"].items():
        table.add_row(name, f"{one['mean_ms']:.3f}", f"{one['median_ms']:.3f}", f"{one['longest_ms']:.3f}")
    return table


def _virtual(figures: dict[str, Any]) -> Table:
    ratio = f"completion of the long prompts {figures['long_completion_ratio']:.2f} times (aim {MOST_STRETCH})"
    table = _table(f"GLM-5.2, {figures['layout']}: {ratio}", "", "over 60 s", *FIGURES, "long prompts, s")
    for name in ("without_long", "fcfs", "fair"):
        one = figures[name]
        waits = [f"{one['ttft_s'][figure]:.2f}" for figure in FIGURES]
        long = " ".join(f"{seconds:.0f}" for seconds in one["long_completion_s"])
        table.add_row(name, f"{one['share_over_60_s']:.1%}", *waits, long)
    return table


def _admission(figures: dict[str, Any]) -> Table:
    title = f"Admission alone, {figures['kv_tokens']:,} tokens of KV: wait for a place and TTFT in s"
    kinds = {"short wait": "queue_s_short", "short": "ttft_s_short", "long wait": "queue_s_long", "long": "ttft_s_long"}
    columns = [f"{kind} {percent}" for kind in kinds for percent in ("p50", "p95")]
    table = _table(title, "max_overtakes", *columns, "overtakes", "tokens/s")
    for name, one in figures["by_max_overtakes"].items():
        waits = [f"{one[key][percent]:.2f}" for key in kinds.values() for percent in ("p50", "p95")]
        table.add_row(name, *waits, f"{one['overtakes']:,}", f"{one['tokens_per_s']:,.0f}")
    return table


def _sweep(figures: dict[str, Any]) -> Table:
    table = _table("Parameters in virtual time: change of TTFT", "load", "parameters", *FIGURES, "tokens/s")
    for load, by_name in figures.items():
        if isinstance(by_name, dict) and load.startswith("load"):
            for name, one in by_name.items():
                table.add_row(load[5:], name, *_changes(one))
    return table


def _real(figures: dict[str, Any]) -> Table:
    title = f"Real engine, {figures['rate']} requests/s of {figures['saturation_rps']}: fair against fcfs"
    table = _table(title, "TTFT", *FIGURES, "tokens/s")
    for policy, key in (("fcfs", "before"), ("fair", "after")):
        for group in ("ttft_s", "ttft_s_short", "ttft_s_long"):
            one = figures[key]
            speed = f"{one['tokens_per_s']:,.0f}" if group == "ttft_s" else ""
            name = f"{policy}{group.removeprefix('ttft_s').replace('_', ', ')}, s"
            table.add_row(name, *(f"{one[group][figure]:.2f}" for figure in FIGURES), speed)
    table.add_row("change", *_changes(figures))
    table.add_row("reported elsewhere", *(f"{REPORTED[figure]:+.1%}" for figure in FIGURES), "")
    return table


def _changes(one: dict[str, Any]) -> list[str]:
    return [*(f"{one['ttft_change'][figure]:+.1%}" for figure in FIGURES), f"{one['throughput_change']:+.2%}"]


_SHOW: dict[str, Callable[[dict[str, Any]], Table]] = {
    "plan": _planning,
    "virtual": _virtual,
    "f2": _admission,
    "sweep": _sweep,
    "real": _real,
}
