"""Conversations whose KV is heavy and whose links are slow: does it pay to look where KV is?"""

from __future__ import annotations

from typing import Any

from rich.progress import Progress

from benchmarks.pd_pools.runs import SLO, Figures, means, one_run
from kllm.simulation.config import SimulationConfig

GB_S = (20.0, 2.0)  # of the links: 200 and 20 Gbit/s
LOAD = 0.9
SEEDS = 3
CONVERSATIONS: dict[str, Any] = {
    "trace": "sessions",
    "num_prompts": 240,
    "request_rate": 1.0,  # brought to LOAD
    "turns": 6,
    "input_len": 12_000,
    "turn_len": 1_000,
    "output_len": 100,
    "think_time": 5.0,
}
POLICIES = {"with": "separate-always", "without": "load-only", "conditional too": "global"}


def measure(progress: Progress) -> dict[str, Any]:
    task = progress.add_task("location", total=len(GB_S) * len(POLICIES) * SEEDS)
    figures: dict[str, Any] = {}
    for gb_s in GB_S:
        for name, policy in POLICIES.items():
            runs: list[Figures] = []
            for seed in range(SEEDS):
                fleet = {"prefill": 4, "decode": 4, "pools": policy, "transfer_gb_s": gb_s, "load": LOAD, "seed": seed}
                engine = {"max_num_seqs": 64, "block_size": 256, "start_s": 1.0}
                runs.append(one_run(SimulationConfig.model_validate(CONVERSATIONS | fleet | engine | SLO)))
                progress.advance(task)
            figures.setdefault(f"{gb_s:g} GB/s", {})[name] = means(runs)
    return {"load": LOAD, "by_speed": figures}
