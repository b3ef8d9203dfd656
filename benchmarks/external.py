"""Two engines of others behind one gateway: how much of the prompts is found in their caches, by how it routes.

    python benchmarks/external.py [--engine vllm|kllm] [--seeds 3] [--blocks 128] [--json] [--results FILE]

The engines are servers of their own on this machine, reached over HTTP; their KV events come over ZeroMQ. The load has
more shared prefixes than one engine's cache holds, and fewer than both hold together. Hit rate: share of prompt tokens,
as the engines count it. Times depend on what else the machine does; hit rates do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks.external_engines.load import Shape, make_requests, run_load
from benchmarks.external_engines.servers import BLOCK_TOKENS, COMMANDS, Place, ServerFailed, running
from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.gateway import InstanceFailed
from kllm.cluster.routing import LeastLoaded, RoundRobin, Router
from kllm.hub.resolver import resolve
from kllm.hub.source import ModelSourceError

RESULTS = Path(__file__).parent / "results" / "external.json"
INSTANCES = 2
# Name, router, whether it hears the engines' KV events.
WAYS: tuple[tuple[str, Callable[[random.Random], Router], bool], ...] = (
    ("cache-aware, KV events", CacheAware, True),
    ("cache-aware, what was routed", CacheAware, False),
    ("round-robin", lambda _: RoundRobin(), False),
    ("least-loaded", LeastLoaded, False),
)


async def compare(places: list[Place], shape: Shape, seeds: int, console: Console) -> dict[str, Any]:
    """Means over the seeds, by way of routing."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in WAYS}
    for seed in range(seeds):
        for turn in range(len(WAYS)):
            number = (turn + seed) % len(WAYS)  # nobody is always the first
            name, router, events = WAYS[number]
            console.print(f"seed {seed}: {name}")
            engines = [place.config(events=events) for place in places]
            requests = make_requests(shape, seed, f"s{seed}w{number}")
            rng = random.Random(seed)
            runs[name].append(await run_load(engines, router(rng), requests, shape.at_once, seed))
    return {name: _mean(each) for name, each in runs.items()}


def _mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "hit_rate": round(statistics.fmean(run["hit_rate"] for run in runs), 4),
        "hit_rates": [run["hit_rate"] for run in runs],
        "ttft_s": {name: round(statistics.fmean(run["ttft_s"][name] for run in runs), 3) for name in ("mean", "p95")},
        "computed_tokens": round(statistics.fmean(run["computed_tokens"] for run in runs)),
        "requests": [run["requests"] for run in runs],
    }


def possible(shape: Shape) -> float:
    """The hit rate if every prefix was computed once, somewhere."""
    found = shape.prefixes * (shape.turns - 1) * (shape.prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    return found / (shape.prefixes * shape.turns * (shape.prefix_tokens + shape.suffix_tokens))


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{INSTANCES} × {report['engine']}, {report['blocks']} blocks each", title_justify="left")
    for column in ("routing", "hit rate", "tokens computed", "TTFT mean, s", "p95"):
        table.add_column(column, justify="left" if column == "routing" else "right")
    for name, figures in report["routing"].items():
        ttft = figures["ttft_s"]
        cells = (f"{figures['hit_rate']:.1%}", f"{figures['computed_tokens']:,}", f"{ttft['mean']:.2f}")
        table.add_row(name, *cells, f"{ttft['p95']:.2f}")
    table.add_row("possible", f"{report['possible_hit_rate']:.1%}", "", "", "")
    console.print(table)


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Raises ServerFailed, InstanceFailed, ModelSourceError, OSError, ValueError."""
    source, shape = resolve(arguments.model), Shape()
    with tempfile.TemporaryDirectory(prefix="kllm-external-") as folder:
        console.print(f"starting {INSTANCES} engines ({arguments.engine})")
        with running(arguments.engine, source, INSTANCES, arguments.blocks, Path(folder)) as places:
            figures = asyncio.run(compare(places, shape, arguments.seeds, console))
    return {
        "engine": arguments.engine,
        "blocks": arguments.blocks,
        "block_tokens": BLOCK_TOKENS,
        "seeds": arguments.seeds,
        "shape": vars(shape),
        "possible_hit_rate": round(possible(shape), 4),
        "routing": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(COMMANDS), default="vllm")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=128, help=f"of {BLOCK_TOKENS} tokens, in each engine's KV cache")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures, by engine")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines must not be left behind
    try:
        report = measure(arguments, console)
    except (ServerFailed, InstanceFailed, ModelSourceError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    show(report, console)
    kept = json.loads(arguments.results.read_text(encoding="utf-8")) if arguments.results.exists() else {}
    kept[arguments.engine] = report
    arguments.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
