"""Records the real engine, fits the simulation to loads A and B, and compares it on loads it has not seen.

    python -m benchmarks.simulation_accuracy                       about 12 minutes
    python -m benchmarks.simulation_accuracy --quick               a few short runs: does it work?
    python -m benchmarks.simulation_accuracy --runs FOLDER         keep the recordings there
    python -m benchmarks.simulation_accuracy --runs FOLDER --reuse  fit and simulate again without measuring

Exit status 1 if a target is missed (not with --quick).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers.results import machine
from benchmarks.simulation_accuracy.calibration import Calibration, calibrate, step_ratio
from benchmarks.simulation_accuracy.loads import FULL, PROBE, QUICK, Load
from benchmarks.simulation_accuracy.real import Run, ServerFailed, record
from benchmarks.simulation_accuracy.report import PUBLISHED, Comparison, as_data, plot, print_table
from benchmarks.simulation_accuracy.simulated import saturation, simulate
from kllm.config import EngineConfig

console = Console(stderr=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation_accuracy", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2", help="alias or path")
    parser.add_argument("--num-kv-blocks", type=int, default=4096, help="of the server and of the simulated instance")
    parser.add_argument("--repeats", type=int, default=4, help="rounds of all loads")
    parser.add_argument("--seeds", type=int, default=5, help="of the simulation's noise")
    parser.add_argument("--quick", action="store_true", help="loads of a few seconds")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--step-times", type=Path, help="file for the fitted model, for kllm simulate --step-times")
    parser.add_argument("--runs", type=Path, help="folder for the recordings")
    parser.add_argument("--reuse", action="store_true", help="take the recordings in --runs instead of measuring")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.seeds) < 1:
        parser.error("--repeats and --seeds must be at least 1")
    if arguments.reuse and arguments.runs is None:
        parser.error("--reuse needs --runs")
    return arguments


async def measure(loads: Sequence[Load], repeats: int, config: EngineConfig) -> list[Run]:
    """Rounds of all loads, so that a machine that becomes slower does so for all of them. Raises ServerFailed."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        async def one(load: Load, rate: float, repeat: int) -> Run:
            task = progress.add_task(f"{load.name}, round {repeat + 1}", total=len(load.samples(rate, repeat)))
            return await record(load, rate, repeat, config, lambda record: progress.advance(task))

        probe = await one(PROBE, 0.0, 0)
        rough = calibrate([probe], "")
        runs = []
        for repeat in range(repeats):
            for load in loads:
                rate = 0.0 if load.closed else load.share * saturation(load, config, rough, _kv_tokens(probe, config))
                runs.append(await one(load, rate, repeat))
        return runs


def _kv_tokens(run: Run, config: EngineConfig) -> int:
    return run.num_blocks * config.block_size


def compare(runs: Sequence[Run], config: EngineConfig, calibration: Calibration, seeds: int) -> list[Comparison]:
    comparisons = []
    for name in dict.fromkeys(run.load.name for run in runs):
        repeats = [run for run in runs if run.load.name == name]
        comparisons.append(
            Comparison(
                load=repeats[0].load,
                rates=[run.rate for run in repeats],
                real=[run.seen for run in repeats],
                simulated=[[simulate(run, config, calibration, seed) for seed in range(seeds)] for run in repeats],
                own_steps=[simulate(run, config, calibrate([run], ""), seed=0) for run in repeats],
                step_ratio=[step_ratio(run, calibration) for run in repeats],
            )
        )
    return comparisons


def keep_runs(folder: Path, runs: Sequence[Run]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        name = f"{run.load.name.replace(' ', '-')}-{run.repeat + 1}.json"
        (folder / name).write_bytes(msgspec.json.encode(run))


def kept_runs(folder: Path, loads: Sequence[Load], repeats: int) -> list[Run]:
    """Raises OSError, msgspec.ValidationError."""
    names = [f"{load.name.replace(' ', '-')}-{repeat + 1}.json" for repeat in range(repeats) for load in loads]
    return [msgspec.json.decode((folder / name).read_bytes(), type=Run) for name in names]


def report(
    comparisons: Sequence[Comparison], calibration: Calibration, config: EngineConfig, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        **facts,
        "engine": config.model_dump(exclude_defaults=True, mode="json"),
        "calibration": {
            "planning_step_us": round(calibration.planning.step_s * 1e6, 1),
            "planning_row_us": round(calibration.planning.row_s * 1e6, 1),
            "path_ms": round(calibration.path_s * 1e3, 3),
            "sigma": round(calibration.sigma, 4),
            "steps": {regime: asdict(error) for regime, error in calibration.times.errors.items()},
        },
        "published_errors": PUBLISHED,
        "loads": [as_data(comparison) for comparison in comparisons],
    }


def run(arguments: argparse.Namespace) -> int:
    loads = QUICK if arguments.quick else FULL
    config = EngineConfig(model=arguments.model, num_kv_blocks=arguments.num_kv_blocks)
    if arguments.reuse:
        runs = kept_runs(arguments.runs, loads, arguments.repeats)
    else:
        runs = asyncio.run(measure(loads, arguments.repeats, config))
        if arguments.runs is not None:
            keep_runs(arguments.runs, runs)
    facts = {"machine": machine(), "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
    hardware = "{cpu}, {cores} cores".format(**machine()) + f"; {arguments.model}"
    calibration = calibrate([run for run in runs if run.load.fitted], hardware)
    comparisons = compare(runs, config, calibration, arguments.seeds)
    print_table(comparisons, Console(width=None if sys.stdout.isatty() else 120))
    if arguments.step_times is not None:
        calibration.times.save(arguments.step_times)
    if arguments.json is not None:
        content = report(comparisons, calibration, config, facts)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot(comparisons, f"{hardware}, {facts['measured_at']}", arguments.plot)
    missed = any(figure.verdict == "missed" for comparison in comparisons for figure in comparison.figures())
    return 1 if missed and not arguments.quick else 0


def main() -> None:
    try:
        sys.exit(run(parse()))
    except (ServerFailed, OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
