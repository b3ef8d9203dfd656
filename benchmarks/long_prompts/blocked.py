"""Admission alone (fairness off): requests that do not fit into a small KV cache, and those behind them that would.

The KV cache holds KV_TOKENS; every prompt with its output fits by itself. First come, first served; what differs is how
often a request that does not fit may be overtaken.
"""

from __future__ import annotations

from typing import Any

from rich.progress import Progress

from benchmarks.long_prompts.mixed import LONG_FROM, MixedLoad, Seen
from benchmarks.long_prompts.simulated import saturation, seen, simulate, this_machine
from kllm.config import EngineConfig
from kllm.simulation.results import FleetResult
from kllm.telemetry.statistics import distribution

OVERTAKES = (0, 4, 16, 64, 256)
KV_TOKENS = 10_240
SHARE = 0.35  # of the saturation with as much KV as one likes
SECONDS = 600.0
SEEDS = (0, 1, 2)
OUTPUT = (64, 256)  # long enough that KV, not computing, is what is short
LONG_SHARE = 0.03


def load(rate: float, seed: int) -> MixedLoad:
    return MixedLoad(rate, SECONDS, seed, long_share=LONG_SHARE, output=OUTPUT, on_s=5.0, off_s=5.0)


def measure(progress: Progress) -> dict[str, Any]:
    """Medians over the seeds, by how often a request may be overtaken."""
    times = this_machine()
    rate = SHARE * saturation(load(1.0, 0).samples(), _config(0), times)
    task = progress.add_task("admission", total=len(OVERTAKES) * len(SEEDS))
    figures = {}
    for limit in OVERTAKES:
        results = []
        for seed in SEEDS:
            results.append(simulate(load(rate, seed).samples(), _config(limit), times, seed, KV_TOKENS))
            progress.advance(task)
        figures[str(limit)] = _figures(results)
    return {"kv_tokens": KV_TOKENS, "rate": round(rate, 3), "by_max_overtakes": figures}


def _config(max_overtakes: int) -> EngineConfig:
    return EngineConfig(model="smollm2", scheduling_policy="fcfs", max_overtakes=max_overtakes)


def _figures(results: list[FleetResult]) -> dict[str, Any]:
    runs = [seen(result) for result in results]
    merged = Seen(
        [pair for run in runs for pair in run.ttft],
        sum(run.tokens for run in runs),
        sum(run.duration_s for run in runs),
    )
    short, long = merged.ttft_s(long=False), merged.ttft_s(long=True)
    return {
        "ttft_s_short": {name: round(value, 3) for name, value in short.items()},
        "ttft_s_long": {name: round(value, 3) for name, value in long.items()},
        "queue_s_short": _queue_s(results, long=False),
        "queue_s_long": _queue_s(results, long=True),
        "overtakes": sum(result.overtakes for result in results),
        "preemptions": sum(result.preemptions for result in results),
        "tokens_per_s": round(merged.tokens_per_s, 1),
    }


def _queue_s(results: list[FleetResult], *, long: bool) -> dict[str, float]:
    """Waiting for a place, of the long or the short prompts of all runs."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    waits = [o.queue_s for o in outcomes if o.queue_s is not None and (o.prompt_tokens >= LONG_FROM) == long]
    return {name: round(value, 3) for name, value in (distribution(waits) or {}).items()}
