"""Bursts of long prompts, then of long outputs, against pools, fixed groups and instances that do both."""

from __future__ import annotations

import json
import tempfile
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.pd_pools.runs import SLO, Figures, means, one_run
from kllm.simulation.config import SimulationConfig
from kllm.simulation.run import saturation_rps
from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.trace_readers import BLOCK_TOKENS

PREFILL, DECODE = 4, 4
PHASE_S, CYCLES = 15.0, 1
PROMPTS = {"input": (4_000, 28_000), "output": (20, 100)}  # a burst of long prompts
OUTPUTS = {"input": (256, 1_024), "output": (50, 350)}  # and one of long outputs
ENGINE = {"max_num_seqs": 64, "block_size": 256, "start_s": 1.0}
ROWS = 18  # that decode within the SLO
LOADS = (0.9, 1.1)
SEEDS = 3
FLEETS: dict[str, dict[str, Any]] = {
    "global pools": {"pools": "global"},
    "global, always separated": {"pools": "separate-always"},
    "P and D chosen together": {"pools": "chosen-together"},
    "any D": {"pools": "random-decode"},
    "2 groups of 2P2D": {"pools": "groups:2"},
    "4 groups of 1P1D": {"pools": "groups:4"},
    "4 groups of 1P1D in turn": {"pools": "groups-in-turn:4"},
    "8 that do both": {"routing": "cache-aware"},
}


def measure(progress: Progress) -> dict[str, Any]:
    """By load and fleet. A load is the share of what the busy side of each phase can do."""
    busiest = rates()
    task = progress.add_task("phases", total=len(LOADS) * len(FLEETS) * SEEDS)
    figures: dict[str, Any] = {}
    for load in LOADS:
        runs: dict[str, list[Figures]] = {name: [] for name in FLEETS}
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "phases.jsonl"
                write_phases(trace, tuple(load * rate for rate in busiest), seed)
                for name, fleet in FLEETS.items():
                    runs[name].append(one_run(configuration(str(trace), fleet, seed)))
                    progress.advance(task)
        figures[str(load)] = {name: means(each) for name, each in runs.items()}
    return {"saturation_rps": dict(zip(("long prompts", "long outputs"), busiest, strict=True)), "by_load": figures}


def configuration(trace: str, fleet: dict[str, Any], seed: int) -> SimulationConfig:
    size = {"instances": PREFILL + DECODE} if "routing" in fleet else {"prefill": PREFILL, "decode": DECODE}
    rest = {"trace": trace, "seed": seed} | ENGINE | SLO
    return SimulationConfig.model_validate(size | rest | fleet)


def rates() -> tuple[float, float]:
    """Requests a second of each phase that saturate the side which that phase is hard on."""
    found = []
    for kind in (PROMPTS, OUTPUTS):
        made = {"trace": "random", "num_prompts": 64, "prefill": PREFILL, "decode": DECODE}
        lengths = {"input_len": sum(kind["input"]) // 2, "output_len": sum(kind["output"]) // 2}
        config = SimulationConfig.model_validate(made | lengths | {"max_num_seqs": ROWS})
        found.append(saturation_rps(config))
    return found[0], found[1]


def write_phases(path: Path, per_s: tuple[float, ...], seed: int) -> None:
    """A trace of independent requests: a phase of each kind in turn, Poisson arrivals within each."""
    rng = np.random.default_rng([seed, 7])
    rows = []
    for phase in range(2 * CYCLES):
        kind, rate = (PROMPTS, OUTPUTS)[phase % 2], per_s[phase % 2]
        times = takewhile(lambda now: now < PHASE_S, poisson_arrivals(rate, 1000 * seed + phase))
        for now in times:
            tokens = int(rng.integers(*kind["input"]))
            first, blocks = len(rows) * 100, -(-tokens // BLOCK_TOKENS)
            rows.append(
                {
                    "timestamp": round(1000 * (phase * PHASE_S + now)),
                    "input_length": tokens,
                    "output_length": int(rng.integers(*kind["output"])),
                    "hash_ids": list(islice(range(first, first + 100), blocks)),
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
