"""Routers compared in virtual time: GLM-5.2 on 8 H200 an instance, recorded traces, every router on the same requests.

    python benchmarks/routing.py [--trace NAME|FILE|agentic] [--instances 8] [--loads 0.7,0.9,1.1] [--seeds 5]
                                 [--requests 600] [--routers cache-aware,round-robin,…] [--json]
    python benchmarks/routing.py --matrix [8|64]     all traces, loads, routers and seeds that docs/routing.md shows:
                                                     an hour of processor time for 8 instances, four for 64
    python benchmarks/routing.py --combination       tiers and cache-aware routing against neither
    python benchmarks/routing.py --late-events       hit rate when reports of caches come late or not at all
    python benchmarks/routing.py --decision-cost     time of a decision, and size of the index

A load is a share of what the fleet could do if requests were dealt out in turn, so that a router that finds more hits
can still serve 1.1. Hit rate: share of prompt tokens. Goodput: share of requests within TTFT 4 s and TPOT 60 ms, of the
rate at which they come. `agentic` is a slice of the agentic trace (benchmarks/cache_routing/agentic.py).

Every finished run is kept in benchmarks/results/routing_runs.jsonl and not made again (--again ROUTERS forgets those of
some routers, --finished shows what is there). Means go to benchmarks/results/routing.json, the page to routing.html
beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks.cache_routing import combination, decision_cost, late_events, report
from benchmarks.cache_routing.runs import Run, RunLog, run_once
from kllm.cluster.routers import ROUTERS

RESULTS = Path(__file__).parent / "results"
MATRIX = {
    8: {"mooncake-conversation": 600, "agentic": 400, "azure-conv": 2000},
    64: {"mooncake-conversation": 2400, "agentic": 1600, "azure-conv": 8000},
}
EXTRA = {"combination": combination, "late_events": late_events, "decision_cost": decision_cost}


def measure(arguments: argparse.Namespace, fleets: dict[int, dict[str, int]], console: Console) -> dict[str, Any]:
    """By trace and fleet. Seed after seed, so that what is there after an interruption is comparable."""
    log = RunLog(arguments.results / "routing_runs.jsonl")
    if arguments.again:
        log.drop(set(arguments.again))
    runs = [
        Run(trace=trace, instances=instances, requests=requests, load=load, router=router, seed=seed)
        for seed in range(arguments.seeds)
        for instances, traces in fleets.items()
        for trace, requests in traces.items()
        for load in arguments.loads
        for router in arguments.routers
    ]
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("simulating", total=len(runs))
        for run in runs:
            if log.get(run) is None and not arguments.finished:
                progress.update(task, description=f"{run.trace}, {run.instances}, {run.load}, {run.router}, {run.seed}")
                log.add(run, run_once(run))
            progress.advance(task)
    parts = {}
    for instances, traces in fleets.items():
        for trace in traces:
            mine = [
                run for run in runs if (run.trace, run.instances) == (trace, instances) and log.get(run) is not None
            ]
            if mine:
                parts[f"{Path(trace).stem}, {instances} instances"] = _part(log, mine)
    return parts


def _part(log: RunLog, mine: list[Run]) -> dict[str, Any]:
    """What is known of one trace and fleet."""
    by_load: dict[str, Any] = {}
    for run in mine:
        by_load.setdefault(str(run.load), {}).setdefault(run.router, []).append(log.get(run))
    means = {
        load: {router: report.means(runs) for router, runs in routers.items()} for load, routers in by_load.items()
    }
    compared = {load: report.against_best(routers) for load, routers in means.items()}
    return {"requests": mine[0].requests, "by_load": means, "ours_over_best_other": compared}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="mooncake-conversation")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[0.7, 0.9, 1.1])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--routers", type=lambda text: text.split(","), default=list(ROUTERS))
    parser.add_argument(
        "--matrix", type=int, nargs="?", const=0, choices=(0, *MATRIX), help="instances; both by default"
    )
    parser.add_argument("--finished", action="store_true", help="simulate nothing: figures of what has been finished")
    parser.add_argument("--again", type=lambda text: text.split(","), default=[], help="routers to measure again")
    for name in EXTRA:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that keeps the figures")
    arguments = parser.parse_args()
    if unknown := {*arguments.routers, *arguments.again} - set(ROUTERS):
        parser.error(f"unknown routers: {', '.join(sorted(unknown))}; there are {', '.join(ROUTERS)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console(stderr=True)
    kept_in = arguments.results / "routing.json"
    kept = json.loads(kept_in.read_text(encoding="utf-8")) if kept_in.exists() else {}
    extra = [name for name in EXTRA if getattr(arguments, name)]
    shown: dict[str, Any]
    if extra:
        shown = {name: EXTRA[name].measure(console) for name in extra}
        kept |= shown
    elif arguments.matrix is not None:
        fleets = {arguments.matrix: MATRIX[arguments.matrix]} if arguments.matrix else MATRIX
        shown = measure(arguments, fleets, console)
        kept |= shown
    else:
        parts = measure(arguments, {arguments.instances: {arguments.trace: arguments.requests}}, console)
        kept |= parts
        [(title, part)] = parts.items()
        report.show(title, part["by_load"], console)
        shown = report.by_policy(part["by_load"])
    kept_in.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    report.write_page(kept, arguments.results / "routing.html")
    if arguments.json:
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
