"""SLO Load in virtual time: does 1 mean that the SLO is just missed, how early does it say so, and how often wrongly?

    python benchmarks/slo_load.py [--instances 2] [--seconds 120] [--seeds 2] [--loads 0.4,0.6,…]
                                  [--routing cache-aware] [--json] [--results FILE]

GLM-5.2 on 8 H200 an instance; made-up requests whose lengths vary by 80 %. The step times that instances really take
deviate from every model's and are noisy; predictions come from what each instance has fitted online.

steady   a Poisson load of prompts and outputs: mean SLO Load, beside the p90 that clients saw over the SLO; and at
         which load each crosses 1.
bursts   of long prompts, and of long outputs, on a light load, every 80 s and of 0.8 to 2.4 times what the SLO allows
         in the long run: seconds from the first prediction of at least 1 to the first measurement of at least 1.
alarms   in the same runs: samples whose prediction is at least 1 although no more than a tenth of the requests that
         arrive in the next 10 s miss the SLO (false), and samples below 1 although more of the next 2 s do (unseen).

Figures go to benchmarks/results/slo_load.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from kllm.cluster.slo_snapshot import Side
from kllm.simulation.config import SimulationConfig
from kllm.simulation.results import FleetResult
from kllm.simulation.run import simulate
from kllm.telemetry.statistics import percentile
from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.generators import random_samples
from kllm.workload.sample import OWN, Sample

RESULTS = Path(__file__).parent / "results" / "slo_load.json"
SIDES = {"prefill": ("TTFT", "ttft_s"), "decode": ("TPOT", "tpot_s")}
WARM_UP = 0.1  # of a run, left out
AHEAD_S, NEXT_S = 10.0, 2.0  # how far an alarm looks, and what it should have seen
EPISODE_S = 30.0  # an alarm this long before a measurement belongs to it
QUIET_S = 10.0  # below 1 for so long: the next time is another episode
STEADY_FIGURES = ("load", "predicted", "measured", "clients_p90")
LOADS = [0.4, 0.6, 0.7, 0.8, 0.9]
BURSTS = (1.4, 0.8, 2.4, 1.1, 1.8)  # of what the SLO allows in the long run, one after the other
BURST_S, BURST_EVERY_S = 15.0, 80.0
FIRST_KEY = 10_000_000  # of a burst's prompts: no other request has them
BASE = 0.3  # between them


@dataclass(frozen=True)
class Workload:
    """Tokens, and the SLOs in milliseconds. rate: requests a second and instance that just meet the SLO, roughly."""

    prompt: int
    output: int
    ttft_ms: float
    tpot_ms: float
    rate: float = 0.0


STEADY = Workload(prompt=8000, output=150, ttft_ms=500.0, tpot_ms=60.0)
SCENARIOS = {
    "long prompts": ("prefill", Workload(prompt=8000, output=50, ttft_ms=2000.0, tpot_ms=60.0, rate=5.0)),
    "long outputs": ("decode", Workload(prompt=500, output=600, ttft_ms=2000.0, tpot_ms=20.0, rate=3.0)),
}


@dataclass(frozen=True)
class Tick:
    """One sample of a side of the pool."""

    at: float
    side: Side


def configuration(arguments: argparse.Namespace, work: Workload, seed: int, **other: Any) -> SimulationConfig:
    values = {
        "trace": "random",
        "instances": arguments.instances,
        "input_len": work.prompt,
        "output_len": work.output,
        "length_spread": 0.8,
        "enable_prefix_caching": False,  # the prompts have nothing in common
        "routing": arguments.routing,
        "seed": seed,
        "start_s": 1.0,
        "sample_every_s": 0.5,
        "slo_ttft_ms": work.ttft_ms,
        "slo_tpot_ms": work.tpot_ms,
    }
    return SimulationConfig.model_validate(values | other)


def saturation(arguments: argparse.Namespace, work: Workload) -> float:
    """Requests a second that saturate the fleet."""
    short = simulate(configuration(arguments, work, 0, num_prompts=20, request_rate=1.0))
    return float(str(short.settings["saturation_rps"]))


def ticks(result: FleetResult, pool: str) -> list[Tick]:
    """While requests arrive, without the warm-up."""
    last = max(outcome.arrival_s for outcome in result.outcomes)
    return [
        Tick(at, snapshot.pools[pool].side)  # type: ignore[index]
        for at, snapshot in result.slo
        if WARM_UP * last <= at <= last
    ]


def seen(result: FleetResult, figure: str, start: float = 0.0, end: float = float("inf")) -> list[float]:
    """TTFT or TPOT of requests that arrived then."""
    values = ((outcome.arrival_s, getattr(outcome, figure)) for outcome in result.outcomes)
    return [value for at, value in values if start <= at < end and value is not None]


def p90(values: Sequence[float]) -> float:
    return percentile(sorted(values), 90.0) if values else 0.0


# -- a steady load ------------------------------------------------------------------------------------------------


def sweep_run(result: FleetResult) -> dict[str, Any]:
    last = max(outcome.arrival_s for outcome in result.outcomes)
    figures: dict[str, Any] = {}
    for pool, (name, figure) in SIDES.items():
        samples = [tick.side for tick in ticks(result, pool)]
        figures[name] = {
            "load": statistics.fmean(side.load for side in samples),
            "predicted": statistics.fmean(side.predicted for side in samples),
            "measured": statistics.fmean(side.measured for side in samples),
            "clients_p90": p90(seen(result, figure, WARM_UP * last, last)) / samples[0].slo_s,
        }
    return figures


def crossing(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Where the line through the points first reaches 1; None where it does not."""
    for (x, y), (next_x, next_y) in pairwise(zip(xs, ys, strict=True)):
        if y < 1.0 <= next_y:
            return x + (next_x - x) * (1.0 - y) / (next_y - y)
    return None


def sweep(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By side: rows of load and figures, and what they come to."""
    task = progress.add_task("steady load", total=len(arguments.loads))
    top = saturation(arguments, STEADY)
    rows = []
    for load in arguments.loads:
        rate = load * top
        config = configuration(arguments, STEADY, 0, request_rate=rate, num_prompts=round(rate * arguments.seconds))
        rows.append((load, sweep_run(simulate(config))))
        progress.advance(task)
    return {name: summary_of(name, rows) for name, _ in SIDES.values()}


def summary_of(name: str, rows: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Of one side. rows: (load offered, figures of sweep_run)."""
    table = [{"offered": load} | run[name] for load, run in rows]
    offered = [row["offered"] for row in table]
    return {
        "rows": [{key: round(value, 3) for key, value in row.items()} for row in table],
        "correlation": _correlation([row["load"] for row in table], [row["clients_p90"] for row in table]),
        "crosses_1": {key: _rounded(crossing(offered, [row[key] for row in table])) for key in STEADY_FIGURES},
    }


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of ranks: whatever the scale, does one rise with the other?"""
    first, second = ([sorted(values).index(value) for value in values] for values in (xs, ys))
    return round(statistics.correlation(first, second), 3) if len(set(first)) > 1 and len(set(second)) > 1 else 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# -- bursts -------------------------------------------------------------------------------------------------------


def leads(samples: Sequence[Tick]) -> list[float | None]:
    """Of every time that the measurement reaches 1: seconds since the prediction did; None where it had not."""
    found: list[float | None] = []
    quiet_since: float | None = samples[0].at if samples else None
    over_since: float | None = None  # the prediction, with pauses of less than QUIET_S
    last_over = -EPISODE_S
    for tick in samples:
        if tick.side.predicted >= 1.0:
            if over_since is None or tick.at - last_over >= QUIET_S:
                over_since = tick.at
            last_over = tick.at
        if tick.side.measured >= 1.0:
            if quiet_since is not None and tick.at - quiet_since >= QUIET_S:
                early = over_since is not None and tick.at - last_over < QUIET_S
                found.append(min(tick.at - over_since, EPISODE_S) if early else None)
            quiet_since = None
        elif quiet_since is None:
            quiet_since = tick.at
    return found


def alarms(result: FleetResult, samples: Sequence[Tick], figure: str) -> Counter[str]:
    """Samples by prediction, load (the larger of prediction and measurement), and what follows."""
    counts: Counter[str] = Counter()
    for tick in samples:
        late, next_late = (_late(tick, seen(result, figure, tick.at, tick.at + span)) for span in (AHEAD_S, NEXT_S))
        if late is None:
            continue
        counts.update(samples=1, misses=next_late or False)
        for name, value in (("predicted", tick.side.predicted), ("load", tick.side.load)):
            alarm = value >= 1.0
            counts[name] += alarm
            counts[f"{name}_false"] += alarm and not late
            counts[f"{name}_unseen"] += bool(next_late) and not alarm
    return counts


def _late(tick: Tick, values: Sequence[float]) -> bool | None:
    """More than a tenth is beyond the SLO; None of nothing."""
    return sum(value > tick.side.slo_s for value in values) > 0.1 * len(values) if values else None


def burst_samples(work: Workload, instances: int, seed: int) -> list[Sample]:
    """All bursts, of prompts that nothing else has, drawn apart from those of the light load."""
    samples: list[Sample] = []
    for number, factor in enumerate(BURSTS):
        rate, own = factor * work.rate * instances, 1000 * (seed + 1) + number
        requests = random_samples(round(rate * BURST_S), work.prompt, work.output, 0.8, own)
        arrivals = poisson_arrivals(rate, own)
        begin, key = (number + 0.5) * BURST_EVERY_S, FIRST_KEY * (number + 1)
        samples += [
            replace(sample, parts=(((OWN, key + place), sample.parts[0][1]),), arrival_s=begin + at)
            for place, (sample, at) in enumerate(zip(requests, arrivals, strict=False))
        ]
    return samples


def bursts(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By kind of burst."""
    task = progress.add_task("bursts", total=len(SCENARIOS) * arguments.seeds)
    figures = {}
    for name, (pool, work) in SCENARIOS.items():
        found: list[float | None] = []
        counts: Counter[str] = Counter()
        rate = BASE * work.rate * arguments.instances
        for seed in range(arguments.seeds):
            count = round(rate * BURST_EVERY_S * len(BURSTS))
            config = configuration(arguments, work, seed, request_rate=rate, num_prompts=count)
            result = simulate(config, extra=burst_samples(work, arguments.instances, seed))
            samples = ticks(result, pool)
            found += leads(samples)
            counts.update(alarms(result, samples, SIDES[pool][1]))
            progress.advance(task)
        figures[name] = {"side": SIDES[pool][0], "lead": lead_figures(found), "alarms": alarm_figures(counts)}
    return figures


def lead_figures(found: Sequence[float | None]) -> dict[str, Any]:
    times = [lead for lead in found if lead is not None]
    return {
        "episodes": len(found),
        "predicted": len(times),
        "median_s": statistics.median(times) if times else None,
        "least_s": min(times, default=None),
        "most_s": max(times, default=None),
    }


def alarm_figures(counts: Counter[str]) -> dict[str, Any]:
    """false: share of the alarms. unseen: share of the samples that misses follow."""

    def share(part: int, whole: int) -> float | None:
        return round(part / whole, 3) if whole else None

    return {"samples": counts["samples"], "misses": counts["misses"]} | {
        name: {
            "alarms": counts[name],
            "false": share(counts[f"{name}_false"], counts[name]),
            "unseen": share(counts[f"{name}_unseen"], counts["misses"]),
        }
        for name in ("predicted", "load")
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="steady load", title_justify="left")
    for column in ("side", "offered", "load", "predicted", "measured", "clients' p90 / SLO"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side, found in figures["steady"].items():
        for row in found["rows"]:
            table.add_row(side, *(f"{row[key]:.2f}" for key in ("offered", *STEADY_FIGURES)))
        crossings = (found["crosses_1"][key] for key in STEADY_FIGURES)
        table.add_row(side, "crosses 1 at", *("-" if value is None else f"{value:.2f}" for value in crossings))
    console.print(table)
    for name, found in figures["bursts"].items():
        console.print(f"bursts of {name} ({found['side']}): {found['lead']}, {found['alarms']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of steady load at each rate")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind of burst")
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=LOADS)
    parser.add_argument("--routing", default="cache-aware")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        figures = {"steady": sweep(arguments, progress), "bursts": bursts(arguments, progress)}
    settings = {"instances": arguments.instances, "seconds": arguments.seconds, "seeds": arguments.seeds}
    kept = {"settings": settings | {"routing": arguments.routing}} | figures
    arguments.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    show(figures, console)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
