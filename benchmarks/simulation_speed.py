"""How fast fleets are simulated, and what the scheduler's own part of a step costs.

    python benchmarks/simulation_speed.py [--json FILE] [--seconds 3600] [--instances 8,16,32,64]

1. An hour of the Mooncake conversation trace on fleets of GLM-5.2 instances of 8 H200: wall time, per step and per row.
   Twice: at the trace's own rate (a larger fleet is idler), and at half of each fleet's saturation (the same load).
2. Scheduler.plan and .commit alone, of steps with 1 to 256 decoding rows: microseconds a row. No executor, no gateway.

One core. The limit of the project is 150 µs a step plus 25 µs a row, everything included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kllm.config import EngineConfig
from kllm.engine.assembly import make_scheduler
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import RowResult, StepResult
from kllm.simulation.config import SimulationConfig
from kllm.simulation.run import simulate

STEP_LIMIT_US, ROW_LIMIT_US = 150.0, 25.0
TRACE = "mooncake-conversation"


def fleet_figures(instances: int, seconds: float, load: float | None, progress: Progress) -> dict[str, Any]:
    """One simulation. `seconds` is of the trace's own time."""
    config = SimulationConfig.model_validate(
        {"trace": TRACE, "limit_seconds": seconds, "instances": instances, "load": load}
    )
    task = progress.add_task(f"{instances} instances, load {load or 'native'}", total=None)
    result = simulate(config, lambda now, done, total: progress.update(task, completed=done, total=total))
    progress.remove_task(task)
    rows = sum(outcome.output_tokens for outcome in result.outcomes)
    return {
        "instances": instances,
        "load": round(result.load or 0.0, 3),
        "requests": len(result.outcomes),
        "simulated_s": round(result.simulated_s, 1),
        "wall_s": round(result.wall_s, 1),
        "steps": result.steps,
        "rows": rows,
        "us_per_step": round(result.wall_s / result.steps * 1e6, 1),
        "limit_s": round((result.steps * STEP_LIMIT_US + rows * ROW_LIMIT_US) * 1e-6, 1),
    }


def scheduler_figures(rows: int, steps: int = 200) -> dict[str, Any]:
    """µs of plan and commit for steps of `rows` decoding rows."""
    config = EngineConfig.model_validate({"model": "none", "block_size": 64, "max_num_seqs": rows})
    scheduler = make_scheduler(config, num_blocks=rows * 64, max_model_len=4096, eos_token_ids=())
    for index in range(rows):
        params = SamplingParams(max_tokens=2 * steps + 200, ignore_eos=True, seed=index)
        scheduler.add(Submit(request=Request(request_id=f"{index}", prompt_token_ids=[index] * 64, params=params)), 0.0)
    planning = committing = 0.0
    measured = 0
    while measured < steps:
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        results = {step.row: RowResult(7) for step in plan.steps if step.sample}
        ready = time.perf_counter()
        scheduler.commit(StepResult(plan.id, results), 0.0)
        ended = time.perf_counter()
        if len(plan.steps) == rows and all(step.count == 1 for step in plan.steps):
            planning += planned - began
            committing += ended - ready
            measured += 1
    return {
        "rows": rows,
        "plan_us": round(planning / steps * 1e6, 1),
        "commit_us": round(committing / steps * 1e6, 1),
        "us_per_row": round((planning + committing) / steps / rows * 1e6, 2),
    }


def show(console: Console, title: str, records: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in records[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for record in records:
        table.add_row(*(f"{value:,}" for value in record.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the trace")
    parser.add_argument("--instances", default="8,16,32,64")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    fleets: list[dict[str, Any]] = []
    scheduler = [scheduler_figures(rows) for rows in (1, 4, 16, 64, 256)]
    with Progress(console=console) as progress:
        for load in (None, 0.5):
            for instances in map(int, arguments.instances.split(",")):
                fleets.append(fleet_figures(instances, arguments.seconds, load, progress))
                console.print(fleets[-1])
    show(console, "Fleets", fleets)
    show(console, "The scheduler alone", scheduler)
    figures = {"fleets": fleets, "scheduler": scheduler, "python": sys.version.split()[0]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    else:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
