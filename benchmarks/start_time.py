"""How long it takes from starting a process to the first token, and where the time goes.

    python benchmarks/start_time.py [MODEL] [--runs 5] [--json]

Two ways: `kllm serve MODEL` (until it says that it is ready, until a request's first
token has arrived) and
the offline API in a fresh interpreter (imports, loading, first token). Medians of several runs; the first run, which
may read a cold disk, is reported apart. The model is fetched before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from kllm.hub import resolve

PROMPT = "The capital of France is"
READY = re.compile(r"kLLM is ready: (?P<url>\S+) .*? in [\d.]+ s(?: \((?P<phases>.*)\))?")
PHASE = re.compile(r"(?P<name>[^,]+?) (?P<seconds>[\d.]+) s")

# Prints the seconds since $KLLM_BENCH_START (the wall clock of the parent) at each step.
OFFLINE = """
import json, os, sys, time
start = float(os.environ["KLLM_BENCH_START"])
marks = {"interpreter": time.time() - start}
import kllm.llm
from kllm import LLM, SamplingParams
marks["imports"] = time.time() - start
llm = LLM(sys.argv[1])
marks["model ready"] = time.time() - start
llm.generate([sys.argv[2]], SamplingParams(max_tokens=1, temperature=0.0), progress=False)
marks["first token"] = time.time() - start
print(json.dumps(marks))
"""


@dataclass
class Run:
    """marks: seconds from process start to each event, in order; instance: seconds of its start by phase."""

    marks: dict[str, float]
    instance: dict[str, float] = field(default_factory=dict)


def time_server(model: str) -> Run:
    """Marks from process start; the phases inside the instance are those that the ready line reports."""
    command = [sys.executable, "-m", "kllm.cli", "serve", model, "--port", "0", "--log-level", "error"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = READY.match(process.stdout.readline())
        if ready is None:
            raise SystemExit(f"the server did not start, status {process.wait()}")
        marks = {"ready": time.perf_counter() - start}
        with httpx.Client(base_url=ready["url"], timeout=60) as http:
            marks["first token"] = _first_token(http, model, start)
        instance = {m["name"].strip(): float(m["seconds"]) for m in PHASE.finditer(ready["phases"] or "")}
        return Run(marks, instance)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _first_token(http: httpx.Client, model: str, start: float) -> float:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data:") and '"choices"' in line:
                return time.perf_counter() - start
    raise SystemExit("the stream ended without a token")


def time_offline(model: str) -> Run:
    environment = os.environ | {"KLLM_BENCH_START": repr(time.time())}
    command = [sys.executable, "-c", OFFLINE, model, PROMPT]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Run(json.loads(result.stdout.splitlines()[-1]))


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Medians over the runs after the first; `phases` are the differences between consecutive marks."""
    warm = runs[1:] or runs
    marks = {name: median(run.marks[name] for run in warm) for name in warm[0].marks}
    times = list(marks.values())
    phases = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    return {
        "first_token_s": round(marks["first token"], 3),
        "first_run_s": round(runs[0].marks["first token"], 3),
        "phases_s": {name: round(phase, 3) for name, phase in zip(marks, phases, strict=True)},
        "instance_s": {name: round(median(run.instance[name] for run in warm), 3) for name in warm[0].instance},
    }


def print_table(report: dict[str, Any], console: Console) -> None:
    table = Table(title="From process start to first token (s)", title_justify="left")
    for column in ("way", "until", "s"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for way in ("server", "offline"):
        figures = report[way]
        for name, seconds in figures["phases_s"].items():
            table.add_row(way, name, f"{seconds:.3f}")
            if name == "ready":
                for phase, spent in figures["instance_s"].items():
                    table.add_row("", f"  of it in the instance: {phase}", f"{spent:.3f}", style="dim")
        table.add_row(way, "in all", f"{figures['first_token_s']:.3f}", end_section=True)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    resolve(arguments.model)
    server, offline = [], []
    for index in range(arguments.runs):
        server.append(time_server(arguments.model))
        offline.append(time_offline(arguments.model))
        seconds = (server[-1].marks["first token"], offline[-1].marks["first token"])
        print(f"run {index + 1}: server {seconds[0]:.2f} s, offline {seconds[1]:.2f} s", file=sys.stderr)
    report = {"model": arguments.model, "server": summarise(server), "offline": summarise(offline)}
    print_table(report, Console(stderr=arguments.json))
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
