"""Which parameters of fairness suit mixed traffic: the load of the real engine, in virtual time, with many seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.progress import Progress

from benchmarks.long_prompts.mixed import MixedLoad, Seen, compare
from benchmarks.long_prompts.simulated import seen, simulate, this_machine
from kllm.config import EngineConfig

SHARES = (0.5, 0.7, 0.85)  # of saturation
SECONDS = 240.0
SEEDS = range(8)
GROWTHS = (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
OTHERS: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"fair_growth 1/{1 / growth:.0f}": {"fair_growth": growth} for growth in GROWTHS},
    "prefill_chunk 256": {"prefill_chunk": 256},
    "max_num_batched_tokens 1024": {"max_num_batched_tokens": 1024},
    "fair_kv_share 0.1": {"fair_kv_share": 0.1},
}


def measure(progress: Progress) -> dict[str, Any]:
    """Changes of TTFT against first come, first served, by share of saturation and parameters."""
    saturation = throughput()
    task = progress.add_task("parameters", total=len(SHARES) * len(SEEDS) * (len(OTHERS) + 1))
    figures: dict[str, Any] = {"saturation_rps": round(saturation, 3)}
    for share in SHARES:
        loads = [MixedLoad(share * saturation, SECONDS, seed) for seed in SEEDS]

        def runs(loads: list[MixedLoad] = loads, **knobs: Any) -> list[Seen]:
            config = EngineConfig.model_validate({"model": "smollm2"} | knobs)
            found = []
            for load in loads:
                found.append(seen(simulate(load.samples(), config, this_machine(), load.seed)))
                progress.advance(task)
            return found

        before = runs(scheduling_policy="fcfs")
        figures[f"load {share}"] = {
            name: compare(before, runs(scheduling_policy="fair", **knobs)) for name, knobs in OTHERS.items()
        }
    return figures


def throughput() -> float:
    """Requests a second when all are there at once."""
    samples = [replace(sample, arrival_s=0.0) for sample in MixedLoad(3.0, 200.0, 0).samples()]
    config = EngineConfig(model="smollm2", scheduling_policy="fcfs")
    return len(samples) / seen(simulate(samples, config, this_machine())).duration_s
