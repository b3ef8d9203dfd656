"""Tiers below the KV cache and cache-aware routing together, against neither: equal model, fleet, traffic and SLO."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cache_routing.runs import Run, run_once

TRACE, INSTANCES, REQUESTS = "mooncake-conversation", 4, 1500
LOADS = (0.9, 1.2, 1.5, 1.8)  # of what the fleet with neither saturates at
HOST_BYTES = 1_500_000_000_000  # of a node with 2 TB
STORE_BYTES = 20_000_000_000_000
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "device cache only, in turn": ("round-robin", {}),
    "device cache only, cache-aware": ("cache-aware", {}),
    "with host memory and store, cache-aware": (
        "cache-aware",
        {"l2_memory": HOST_BYTES, "l3": "shared", "l3_capacity": STORE_BYTES},
    ),
}
PAPER = {"hit_rate_points": 20.0, "throughput": 1.3}  # as reported for the same combination


def measure(console: Console) -> dict[str, Any]:
    """By system and load; throughput: the most requests a second within the SLO, over all loads."""
    runs: dict[str, dict[str, Any]] = {}
    for name, (router, tiers) in SYSTEMS.items():
        for load in LOADS:
            run = Run(trace=TRACE, instances=INSTANCES, requests=REQUESTS, load=load, router=router, seed=0)
            with console.status(f"{name}, load {load}"):
                found = run_once(run, **tiers)
            kept = ("hit_rate", "ttft_mean_s", "ttft_p95_s", "goodput_rps", "slo_share")
            runs.setdefault(name, {})[str(load)] = {figure: round(found[figure], 4) for figure in kept}
    _show(runs, console)
    neither, *_, both = runs.values()
    gained = {load: round(100 * (both[load]["hit_rate"] - neither[load]["hit_rate"]), 1) for load in both}
    return {
        "trace": TRACE,
        "instances": INSTANCES,
        "requests": REQUESTS,
        "runs": runs,
        "hit_rate_points": gained,
        "throughput": round(_most(both) / _most(neither), 3),
        "reported": PAPER,
    }


def _most(by_load: dict[str, Any]) -> float:
    return float(max(one["goodput_rps"] for one in by_load.values()))


def _show(runs: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{TRACE}, {INSTANCES} instances", title_justify="left")
    for column in ("system", "load", "hit rate", "TTFT mean, s", "p95", "goodput, 1/s", "in SLO"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, by_load in runs.items():
        for load, one in by_load.items():
            table.add_row(
                name,
                load,
                f"{one['hit_rate']:.1%}",
                f"{one['ttft_mean_s']:.2f}",
                f"{one['ttft_p95_s']:.2f}",
                f"{one['goodput_rps']:.2f}",
                f"{one['slo_share']:.1%}",
            )
    console.print(table)
