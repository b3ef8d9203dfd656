"""The figures as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

TIERS = ("l1", "l2", "l3")
BUBBLES = ("no_cache", "l1", "l1_rescanning", "all_tiers", "all_tiers_fetching")


def print_figures(kept: dict[str, Any], console: Console) -> None:
    """Of every part that has been measured."""
    if "real" in kept:
        console.print(_real(kept["real"]))
    for trace, figures in kept.get("virtual", {}).items():
        if isinstance(figures, dict) and "runs" in figures:
            title = f"GLM-5.2 on 8 H200, {trace} at {figures['load']} of saturation"
            console.print(_hits(title, figures["infinite_cache_hit_rate"], figures["runs"]))
    if "bubbles" in kept:
        console.print(_bubbles(kept["bubbles"]))
        console.print(_real_engine(kept["bubbles"]["real_engine"]))


def _real(figures: dict[str, Any]) -> Table:
    gain = f"{figures['rate_gain_at_equal_p95']:.2f} times the rate at equal p95 TTFT"
    title = f"{figures['model']}, L1 {figures['l1_share']:.0%} of {figures['working_set_tokens']:,} tokens: {gain}"
    sweep = {f"L1 of {share}": run for share, run in figures["l1_sweep"].items()}
    higher = {f"at {run['rate']}/s": run for run in figures["at_higher_rates"]}
    two = {"two instances": figures["two_instances_one_store"]}
    return _hits(title, figures["infinite_cache_hit_rate"], figures["runs"] | two | higher | sweep)


def _hits(title: str, infinite: float, runs: dict[str, Any]) -> Table:
    table = Table(title=f"{title} (infinite cache {infinite:.1%})", title_justify="left")
    for column in ("", *TIERS, "all", "of infinite", "TTFT mean", "p95", "requests/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in runs.items():
        rates = run["hit_rate"]
        total = sum(rates.values())
        table.add_row(
            name,
            *(f"{rates[tier]:.1%}" for tier in TIERS),
            f"{total:.1%}",
            f"{total / infinite:.1%}",
            f"{run['ttft_s']['mean']:.3f}",
            f"{run['ttft_s']['p95']:.3f}",
            f"{run['requests_per_s']:.3f}",
        )
    return table


def _bubbles(figures: dict[str, Any]) -> Table:
    title = f"Time between steps, ms: a prompt of {figures['tokens']:,} tokens in chunks of {figures['chunk']:,}"
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "p50", "p99", "longest", "means of its quarters"):
        table.add_column(column, justify="right" if column else "left")
    for name in BUBBLES:
        one = figures[name]
        quarters = " ".join("-" if mean is None else f"{mean:.2f}" for mean in one["mean_ms_by_quarter"])
        table.add_row(name, *(f"{one[key]:.2f}" for key in ("mean_ms", "p50_ms", "p99_ms", "max_ms")), quarters)
    return table


def _real_engine(figures: dict[str, Any]) -> Table:
    title = f"{figures['model']}, {figures['prompts']} prompts of {figures['tokens']:,} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("", "ms between steps", "prefill, s"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("incremental", "rescanning"):
        table.add_row(name, f"{figures[name]['mean_ms']:.3f}", f"{figures[name]['prefill_s']:.2f}")
    return table
