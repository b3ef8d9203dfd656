"""SLO Load in virtual time: does 1 mean that the SLO is just missed, how early does it say so, and how often wrongly?

    python benchmarks/slo_load.py [--instances 4] [--seconds 300] [--seeds 2] [--loads 0.4,0.6,…] [--routing cache-aware]
                                  [--json] [--results FILE] [--page FILE]

GLM-5.2 on 8 H200 an instance; made-up requests of uneven length (prompts of 8,000 tokens, outputs of 300, each varying
by 80 %). The step times that instances really take deviate from every model's and are noisy; predictions come from what
each instance has fitted online. One sample a second.

sweep   a steady Poisson load: mean SLO Load, beside the p90 that clients saw over the SLO; and where each crosses 1.
bursts  load that comes in bursts above capacity: seconds from the first prediction of at least 1 to the first
        measurement of at least 1, of every episode.
alarms  of the same runs: samples whose prediction is at least 1 although no more than a tenth of the requests that
        arrive in the next 10 s miss the SLO (false), and samples below 1 although more do (missed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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

RESULTS = Path(__file__).parent / "results" / "slo_load.json"
SIDES = {"prefill": ("TTFT", "ttft_s"), "decode": ("TPOT", "tpot_s")}
WARM_UP = 0.2  # of a run, left out
AHEAD_S = 10.0  # how far an alarm looks
EPISODE_S = 30.0  # an alarm this long before a measurement belongs to it
QUIET_S = 10.0  # below 1 for so long: the next time is another episode
LOADS = [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]


@dataclass(frozen=True)
class Tick:
    """One sample of a side of the pool."""

    at: float
    side: Side


def configuration(arguments: argparse.Namespace, seed: int, **other: Any) -> SimulationConfig:
    """Of a run; `other` wins."""
    values = {
        "trace": "random",
        "instances": arguments.instances,
        "input_len": 8000,
        "output_len": 300,
        "length_spread": 0.8,
        "enable_prefix_caching": False,  # the prompts have nothing in common
        "routing": arguments.routing,
        "seed": seed,
        "start_s": 1.0,
        "sample_every_s": 1.0,
        "slo_ttft_ms": arguments.slo_ttft_ms,
        "slo_tpot_ms": arguments.slo_tpot_ms,
    }
    return SimulationConfig.model_validate(values | other)


def saturation(arguments: argparse.Namespace) -> float:
    """Requests a second that saturate the fleet."""
    short = simulate(configuration(arguments, 0, num_prompts=200, request_rate=1.0))
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
    points = list(zip(xs, ys, strict=True))
    for (x, y), (next_x, next_y) in zip(points, points[1:], strict=False):
        if y < 1.0 <= next_y:
            return x + (next_x - x) * (1.0 - y) / (next_y - y)
    return None


def sweep(arguments: argparse.Namespace, top: float, progress: Progress) -> dict[str, Any]:
    """By side: rows of load and figures, and what they come to."""
    task = progress.add_task("steady load", total=len(arguments.loads) * arguments.seeds)
    rows = []
    for load in arguments.loads:
        runs = []
        for seed in range(arguments.seeds):
            rate = load * top
            config = configuration(arguments, seed, request_rate=rate, num_prompts=round(rate * arguments.seconds))
            runs.append(sweep_run(simulate(config)))
            progress.advance(task)
        rows.append((load, runs))
    return {name: summary_of(name, rows) for name, _ in SIDES.values()}


def summary_of(name: str, rows: Sequence[tuple[float, list[dict[str, Any]]]]) -> dict[str, Any]:
    table = [
        {"offered": load} | {key: statistics.fmean(run[name][key] for run in runs) for key in runs[0][name]}
        for load, runs in rows
    ]
    offered = [row["offered"] for row in table]
    single = [run[name] for _, runs in rows for run in runs]
    return {
        "rows": [{key: round(value, 3) for key, value in row.items()} for row in table],
        "correlation": _correlation([run["load"] for run in single], [run["clients_p90"] for run in single]),
        "crosses_1": {
            key: _rounded(crossing(offered, [row[key] for row in table]))
            for key in ("load", "predicted", "measured", "clients_p90")
        },
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
                near = over_since is not None and tick.at - last_over < QUIET_S
                found.append(min(tick.at - (over_since or 0.0), EPISODE_S) if near else None)
            quiet_since = None
        elif quiet_since is None:
            quiet_since = tick.at
    return found


def alarms(result: FleetResult, samples: Sequence[Tick], figure: str) -> dict[str, int]:
    """Samples by (prediction, load) and what follows."""
    counts = dict.fromkeys(("samples", "misses", "alarms", "false", "unseen", "load_alarms", "load_false", "load_unseen"), 0)
    for tick in samples:
        following = seen(result, figure, tick.at, tick.at + AHEAD_S)
        if not following:
            continue
        late = sum(value > tick.side.slo_s for value in following) > 0.1 * len(following)
        predicted, load = tick.side.predicted >= 1.0, tick.side.load >= 1.0
        counts["samples"] += 1
        counts["misses"] += late
        counts["alarms"] += predicted
        counts["false"] += predicted and not late
        counts["unseen"] += late and not predicted
        counts["load_alarms"] += load
        counts["load_false"] += load and not late
        counts["load_unseen"] += late and not load
    return counts


def bursts(arguments: argparse.Namespace, top: float, progress: Progress) -> dict[str, Any]:
    """Bursts of 20 s on average at 1.6 of saturation, and 40 s of nothing."""
    task = progress.add_task("bursts", total=arguments.seeds)
    found: dict[str, list[float | None]] = {name: [] for name, _ in SIDES.values()}
    counts: dict[str, dict[str, int]] = {name: {} for name, _ in SIDES.values()}
    rate = arguments.burst * top / 3
    for seed in range(arguments.seeds):
        config = configuration(
            arguments,
            seed,
            request_rate=rate,
            arrivals="bursty",
            burst_on=20.0,
            burst_off=40.0,
            num_prompts=round(rate * 3 * arguments.seconds),
        )
        result = simulate(config)
        for pool, (name, figure) in SIDES.items():
            samples = ticks(result, pool)
            found[name] += leads(samples)
            for key, value in alarms(result, samples, figure).items():
                counts[name][key] = counts[name].get(key, 0) + value
        progress.advance(task)
    return {name: {"lead": lead_figures(found[name]), "alarms": alarm_figures(counts[name])} for name in found}


def lead_figures(found: Sequence[float | None]) -> dict[str, Any]:
    times = [lead for lead in found if lead is not None]
    return {
        "episodes": len(found),
        "predicted": len(times),
        "median_s": statistics.median(times) if times else None,
        "least_s": min(times, default=None),
        "most_s": max(times, default=None),
    }


def alarm_figures(counts: dict[str, int]) -> dict[str, Any]:
    """Shares: false of the alarms, unseen of the samples that misses follow; and those of the load itself."""

    def share(part: str, whole: str) -> float | None:
        return round(counts[part] / counts[whole], 3) if counts[whole] else None

    return counts | {
        "false_share": share("false", "alarms"),
        "unseen_share": share("unseen", "misses"),
        "load_false_share": share("load_false", "load_alarms"),
        "load_unseen_share": share("load_unseen", "misses"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=LOADS)
    parser.add_argument("--burst", type=float, default=1.6, help="load during a burst")
    parser.add_argument("--routing", default="cache-aware")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=60.0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        top = saturation(arguments)
        steady = sweep(arguments, top, progress)
        burst = bursts(arguments, top, progress)
    figures = {"saturation_rps": round(top, 3), "steady": steady, "bursts": burst}
    if arguments.json:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
