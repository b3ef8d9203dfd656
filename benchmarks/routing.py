"""Routers compared in virtual time: GLM-5.2 on 8 H200 an instance, recorded traces, every router on the same requests.

    python benchmarks/routing.py [--trace NAME|FILE] [--instances 8] [--loads 0.7,0.9,1.1] [--seeds 1]
                                 [--requests 1500] [--routers cache-aware,round-robin,…] [--json] [--results FILE]

A load is a share of what the fleet could do if requests were dealt out in turn, so that a router that finds more hits
can still serve 1.1. Hit rate: share of prompt tokens. Goodput: requests a second within TTFT 4 s and TPOT 60 ms.
Figures are means over the seeds; they are kept in benchmarks/results/routing.json by trace and number of instances.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from kllm.cluster.routers import ROUTERS
from kllm.simulation.config import SimulationConfig
from kllm.simulation.run import simulate
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo

RESULTS = Path(__file__).parent / "results" / "routing.json"
FIGURES = ("hit_rate", "ttft_mean_s", "ttft_p95_s", "goodput_rps")


def one_run(trace: str, instances: int, requests: int, load: float, router: str, seed: int) -> dict[str, float]:
    config = SimulationConfig.model_validate(
        {
            "trace": trace,
            "instances": instances,
            "num_prompts": requests,
            "load": load,
            "routing": router,
            "seed": seed,
            "start_s": 1.0,
        }
    )
    report = summarise(simulate(config), Slo())
    return {
        "hit_rate": sum(report["hit_rate"].values()),
        "ttft_mean_s": report["ttft_s"]["mean"],
        "ttft_p95_s": report["ttft_s"]["p95"],
        "goodput_rps": report["goodput_rps"],
    }


def measure(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By load and router."""
    loads, routers = arguments.loads, arguments.routers
    task = progress.add_task(arguments.trace, total=len(loads) * len(routers) * arguments.seeds)
    figures: dict[str, Any] = {}
    for load in loads:
        for router in routers:
            runs = []
            for seed in range(arguments.seeds):
                runs.append(one_run(arguments.trace, arguments.instances, arguments.requests, load, router, seed))
                progress.advance(task)
            means = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in FIGURES}
            figures.setdefault(str(load), {})[router] = {
                "hit_rate": means["hit_rate"],
                "ttft_s": {"mean": means["ttft_mean_s"], "p95": means["ttft_p95_s"]},
                "goodput_rps": means["goodput_rps"],
            }
    return figures


def show(title: str, figures: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("load", "router", "hit rate", "TTFT mean, s", "p95", "goodput, 1/s"):
        table.add_column(column, justify="right" if column not in ("load", "router") else "left")
    for load, by_router in figures.items():
        for router, one in by_router.items():
            waits = one["ttft_s"]
            table.add_row(
                load,
                router,
                f"{one['hit_rate']:.1%}",
                f"{waits['mean']:.2f}",
                f"{waits['p95']:.2f}",
                f"{one['goodput_rps']:.3f}",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="mooncake-conversation")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[0.7, 0.9, 1.1])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--routers", type=lambda text: text.split(","), default=list(ROUTERS))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    if unknown := set(arguments.routers) - set(ROUTERS):
        parser.error(f"unknown routers: {', '.join(sorted(unknown))}; there are {', '.join(ROUTERS)}")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        figures = measure(arguments, progress)
    title = f"{Path(arguments.trace).stem}, {arguments.instances} instances"
    kept = json.loads(arguments.results.read_text(encoding="utf-8")) if arguments.results.exists() else {}
    kept[title] = {"requests": arguments.requests, "seeds": arguments.seeds, "by_load": figures}
    arguments.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    show(title, figures, console)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
