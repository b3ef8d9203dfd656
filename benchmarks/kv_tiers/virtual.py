"""The tiers in virtual time: recorded traces on one simulated instance of GLM-5.2 on 8 H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kllm.workload.reuse import infinite_cache_hits
from rich.progress import Progress, TaskID

from kllm.simulation.config import SimulationConfig
from kllm.simulation.results import FleetResult
from kllm.simulation.run import samples_of, simulate
from kllm.telemetry.statistics import distribution

TRACES = {"mooncake-conversation": 1500, "weka-agentic": 1500}  # requests of each
LOAD = 0.7
HOST_BYTES = 1_500_000_000_000  # of a node with 2 TB: 27.8 M tokens of 53,940 B
STORE_BYTES = 20_000_000_000_000
TIERS: dict[str, dict[str, Any]] = {
    "l1": {},
    "l1_l2": {"l2_memory": HOST_BYTES},
    "l1_l2_l3": {"l2_memory": HOST_BYTES, "l3": "shared", "l3_capacity": STORE_BYTES},
    "l1_l3": {"l3": "shared", "l3_capacity": STORE_BYTES},
}


def measure(progress: Progress) -> dict[str, Any]:
    return {trace: _trace(trace, requests, progress) for trace, requests in TRACES.items()}


def _trace(trace: str, requests: int, progress: Progress) -> dict[str, Any]:
    knobs = {"trace": trace, "num_prompts": requests, "instances": 1, "load": LOAD, "start_s": 1.0}
    plain = SimulationConfig.model_validate(knobs)
    hits, total = infinite_cache_hits(samples_of(plain), plain.block_size)
    infinite = hits / total
    runs = {}
    for name, tiers in TIERS.items():
        config = SimulationConfig.model_validate(knobs | tiers)
        task = progress.add_task(f"{trace}, {name}", total=None)
        result = simulate(
            config, lambda now, done, total, task=task: progress.update(task, completed=done, total=total)
        )
        progress.remove_task(task)
        runs[name] = _figures(result, infinite)
    return {"infinite_cache_hit_rate": round(infinite, 4), "load": LOAD, "requests": requests, "runs": runs}


def _shower(progress: Progress, task: TaskID) -> Callable[[float, int, int], None]:
    return lambda now, done, total: progress.update(task, completed=done, total=total)


def _figures(result: FleetResult, infinite: float) -> dict[str, Any]:
    rates = result.hit_rate
    waits = [outcome.ttft_s for outcome in result.outcomes if outcome.ttft_s is not None]
    spread = distribution(waits) or {}
    duration = max(o.end_s for o in result.outcomes) - min(o.arrival_s for o in result.outcomes)
    return {
        "hit_rate": {tier: round(rate, 4) for tier, rate in rates.items()},
        "share_of_infinite": round(sum(rates.values()) / infinite, 4),
        "ttft_s": {name: round(spread[name], 3) for name in ("mean", "p50", "p95")},
        "requests_per_s": round(len(result.outcomes) / duration, 4),
    }
