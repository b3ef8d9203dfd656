"""The highest rate at which a server keeps its latencies: kLLM in several formats, and vLLM.

    python benchmarks/served.py [--servers vllm-bf16,kllm-bf16,kllm-int8,kllm-4bit] [--requests 200]
                                [--first vllm-bf16=1.2,kllm-int8=2.4] [--json]

Requests of 512 tokens in and 128 out come as a Poisson process, always the same one, faster and faster, each with a
prompt that was never sent before. A rate is kept
if 95 % of the requests have their first token within 1 s and their others within 100 ms each on average. From a first
guess the rate grows by a ninth while it is kept, or falls until it is. Every server has both cores and its defaults
otherwise, and runs alone. Some ten minutes a server, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks.external_engines.servers import (
    Command,
    Place,
    ServerFailed,
    free_places,
    kllm_server,
    started,
    vllm_server,
)
from benchmarks.peers.results import machine
from kllm.benchmark.config import LoadConfig
from kllm.benchmark.serving import make_samples, run_benchmark
from kllm.hub.resolver import resolve
from kllm.hub.source import ModelSource

RESULTS = Path(__file__).parent / "results" / "served.json"
TTFT_MS, TPOT_MS, SHARE = 1000.0, 100.0, 0.95
FASTER = 10 / 9
MOST_RATES = 8


def _vllm(source: ModelSource, place: Place) -> Command:
    return vllm_server(source, place, os.cpu_count() or 1)


def _kllm(*options: str) -> Callable[[ModelSource, Place], Command]:
    def command(source: ModelSource, place: Place) -> Command:
        words, variables = kllm_server(source, place)
        return [*words, *options], variables

    return command


BF16 = ("--dtype", "bfloat16", "--quantization", "none", "--kv-cache-dtype", "bfloat16")
INT8 = ("--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8")
# Command, and the requests a second that are tried first.
SERVERS: dict[str, tuple[Callable[[ModelSource, Place], Command], float]] = {
    "vllm-bf16": (_vllm, 0.7),
    "kllm-bf16": (_kllm(*BF16), 0.9),
    "kllm-int8": (_kllm(*INT8), 1.4),
    "kllm-4bit": (_kllm("--kv-cache-dtype", "int8"), 1.2),
}


def run_at(place: Place, rate: float, requests: int, turn: int) -> dict[str, Any]:
    """One rate: share of the requests within both limits, and the latencies. turn: of the server's; each has prompts
    of its own, so that no cache has any of them."""
    config = LoadConfig(
        url=f"http://127.0.0.1:{place.port}",
        num_prompts=requests,
        input_len=512,
        output_len=128,
        request_rate=rate,
        slo_ttft_ms=TTFT_MS,
        slo_tpot_ms=TPOT_MS,
        warm_up=3,
    )
    samples = make_samples(config)  # the same times for every rate, but for the rate
    report, _ = asyncio.run(run_benchmark(config.model_copy(update={"seed": turn}), samples))
    assert report["cached_tokens"] == 0, "prompts are to be computed"
    return {
        "rate": round(rate, 3),
        "share": report["goodput"]["share"],
        "completed": report["completed"],
        "ttft_p95_ms": report["ttft_ms"]["p95"],
        "tpot_p95_ms": report["tpot_ms"]["p95"],
        "output_tokens_per_s": report["output_tokens_per_s"],
    }


def highest_rate(place: Place, first: float, requests: int, console: Console) -> dict[str, Any]:
    """The highest rate that is kept, None if even the last tried is not; and all that were tried."""
    tried: list[dict[str, Any]] = []
    rate, best = first, None
    while len(tried) < MOST_RATES:
        with console.status(f"{rate:.3f} requests/s"):
            found = run_at(place, rate, requests, len(tried))
        tried.append(found)
        console.print(found)
        kept = found["share"] >= SHARE
        if kept:
            best = max(best or 0.0, found["rate"])
        if kept != (tried[0]["share"] >= SHARE):
            break  # one side of the limit, then the other
        rate = rate * FASTER if kept else rate / FASTER
    return {"highest_rps": best, "tried": tried}


def first_rates(text: str) -> dict[str, float]:
    pairs = (pair.split("=") for pair in text.split(","))
    return {name: float(rate) for name, rate in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=list(SERVERS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=200, help="of each rate")
    parser.add_argument("--first", type=first_rates, default={}, help="requests/s to begin with: server=rate, …")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures, by server")
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(SERVERS):
        parser.error(f"unknown servers: {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers must not be left behind
    results = arguments.results
    kept = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    source = resolve(arguments.model)
    for name in arguments.servers:
        command, first = SERVERS[name]
        first = arguments.first.get(name, first)
        console.print(f"starting {name}")
        with tempfile.TemporaryDirectory(prefix="kllm-served-") as folder:
            [place] = free_places(1, Path(folder))
            try:
                with started({place: command(source, place)}):
                    kept[name] = highest_rate(place, first, arguments.requests, console)
            except ServerFailed as error:
                sys.exit(f"{name}: {error}")
        kept["machine"] = machine()
        results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps({name: kept[name] for name in arguments.servers}))


if __name__ == "__main__":
    main()
