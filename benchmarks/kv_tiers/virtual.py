"""The tiers in virtual time: recorded traces on one simulated instance of GLM-5.2 on 8 H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.progress import Progress, TaskID

from kllm.simulation.config import SimulationConfig
from kllm.simulation.results import FleetResult
from kllm.simulation.run import simulate
from kllm.simulation.summary import Slo, summarise
from kllm.workload.replay import trace_samples
from kllm.workload.reuse import infinite_cache_hits
from kllm.workload.traces import read_trace

TRACES = {"mooncake-conversation": 1500, "weka-agentic": 1500}  # requests of each
LOAD = 0.7
SLO_MS = (4000.0, 60.0)  # TTFT, TPOT
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
    samples = trace_samples(read_trace(trace, limit_requests=requests), plain.scale)
    hits, total = infinite_cache_hits(samples, plain.block_size)
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
    figures = summarise(result, Slo(*SLO_MS))
    rates = figures["hit_rate"]
    return {
        "hit_rate": {tier: round(rate, 4) for tier, rate in rates.items()},
        "share_of_infinite": round(sum(rates.values()) / infinite, 4),
        "ttft_s": {name: round(figures["ttft_s"][name], 3) for name in ("mean", "p50", "p95")},
        "requests_per_s": figures["requests_per_s"],
        "goodput_rps": figures["goodput_rps"],
    }
