"""What the HTTP server and the gateway add to a request: `kllm serve` in front of instances that answer at once.

    python benchmarks/gateway_overhead.py             all loads, under four minutes; needs a quiet machine
    python benchmarks/gateway_overhead.py --json      the figures on standard output, tables on standard error
    python benchmarks/gateway_overhead.py --profile   also where the server's time goes, at 200 requests/s

The server is the real one, in a process of its own; behind its real links are mock instances in processes of their
own. A prompt has 512 tokens; 16 come back as a stream, the first at once, the others with steps 15 ms apart. All of the
time to the first token is therefore the server's, the network's and the client's; what the last two take is shown by
the same client on a server that does nothing.

The rate grows until the median time to the first token doubles, passes 20 ms, or answers fall behind: the saturation
point. The cost of a token is the difference in CPU time between streams of 80 and of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks.gateway.client import chat, completion
from benchmarks.gateway.load import measure_load
from benchmarks.gateway.processes import Served, bare_server, gateway_server
from benchmarks.gateway.prompts import prompts, texts
from benchmarks.gateway.report import print_figures
from benchmarks.gateway.server import ServerSettings
from benchmarks.peers.results import machine
from benchmarks.simulation_accuracy.real import ServerFailed
from kllm.hub import resolve
from kllm.tokenization.tokenizer import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "gateway_overhead.json"
PROMPT_TOKENS, OUTPUT_TOKENS, LONG_OUTPUT = 512, 16, 80
RATE = 200.0
TOKEN_RATE = 50.0  # of the loads whose difference is the cost of a token
RATES = (50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 800.0, 1000.0, 1300.0, 1600.0)
STEP_S = 0.015
WARM_UP_S = 2.0
FALLEN_BEHIND = 0.95  # of the rate
SATURATED_MS = 20.0
NUM_PROMPTS = 256


@dataclass(frozen=True)
class Bench:
    """Messages to a server that listens, and how long a load takes. period_s: of the steps of all instances."""

    served: Served
    model: str
    passages: list[list[int]]
    texts: list[str]
    seconds: float
    period_s: float

    def load(self, rate: float, messages: Sequence[bytes], tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
        return uvloop.run(measure_load(self.served, messages, tokens, rate, self.seconds, self.period_s))

    def completions(self, prompts: Sequence[str | list[int]], tokens: int = OUTPUT_TOKENS) -> list[bytes]:
        return [completion(self.served.host, self.served.port, self.model, prompt, tokens) for prompt in prompts]

    def chats(self) -> list[bytes]:
        return [chat(self.served.host, self.served.port, self.model, text, OUTPUT_TOKENS) for text in self.texts]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every load on one server. Raises ServerFailed."""
    tokenizer = load_tokenizer(resolve(arguments.model, progress=False))
    passages = prompts(tokenizer, NUM_PROMPTS, PROMPT_TOKENS, random.Random(5))
    settings = ServerSettings(arguments.model, tokenizer.vocab_size, arguments.instances, arguments.routing, STEP_S)
    with gateway_server(settings) as served:
        bench = Bench(
            served,
            arguments.model,
            passages,
            texts(tokenizer, passages),
            arguments.seconds,
            STEP_S / settings.instances,
        )
        figures = _loads(bench, arguments.rates, console)
    with bare_server(STEP_S, OUTPUT_TOKENS) as bare:
        console.print("a server that does nothing …")
        messages = [completion(bare.host, bare.port, arguments.model, text, OUTPUT_TOKENS) for text in bench.texts]
        figures["bare"] = uvloop.run(measure_load(bare, messages, OUTPUT_TOKENS, RATE, arguments.seconds, None))
    if arguments.profile:
        console.print("profile …")
        figures["profile"] = _profile(settings, bench)
    return figures


def _loads(bench: Bench, rates: Sequence[float], console: Console) -> dict[str, Any]:
    text = bench.completions(bench.texts)
    uvloop.run(measure_load(bench.served, text, OUTPUT_TOKENS, RATE, WARM_UP_S, bench.period_s))
    others: dict[str, Callable[[], dict[str, Any]]] = {
        "token_ids": lambda: bench.load(RATE, bench.completions(bench.passages)),
        "chat": lambda: bench.load(RATE, bench.chats()),
        "short_outputs": lambda: bench.load(TOKEN_RATE, text),
        "long_outputs": lambda: bench.load(TOKEN_RATE, bench.completions(bench.texts, LONG_OUTPUT), LONG_OUTPUT),
    }
    figures: dict[str, Any] = {}
    for name, load in others.items():
        console.print(f"{name} …")
        figures[name] = load()
    figures["rates"] = []
    for rate in rates:
        console.print(f"{rate:g} requests/s …")
        figures["rates"].append(bench.load(rate, text))
        if rate > RATE and saturated(figures["rates"]):
            break
    return figures


def saturated(loads: Sequence[dict[str, Any]]) -> bool:
    """Whether the last of these loads, of growing rates, is too much."""
    first, last = loads[0], loads[-1]
    slow = last["ttft_p50_ms"] > max(2 * first["ttft_p50_ms"], 1.0) or last["ttft_p50_ms"] > SATURATED_MS
    return bool(slow or last["completed_rps"] < FALLEN_BEHIND * last["rate"])


def _profile(settings: ServerSettings, bench: Bench) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        profiled = ServerSettings(
            settings.model, settings.vocab_size, settings.instances, settings.routing, settings.step_s, str(file)
        )
        with gateway_server(profiled) as served:
            again = Bench(served, bench.model, bench.passages, bench.texts, bench.seconds, bench.period_s)
            again.load(RATE, again.completions(bench.texts))
        return dict(json.loads(file.read_bytes()))


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that others read by name; then all."""
    at_rate = next((load for load in figures["rates"] if load["rate"] == RATE), figures["rates"][-1])
    short, long = figures["short_outputs"], figures["long_outputs"]
    added = (long["cpu_us_per_request"] - short["cpu_us_per_request"]) / (LONG_OUTPUT - OUTPUT_TOKENS)
    unsaturated = [i for i in range(len(figures["rates"])) if not saturated(figures["rates"][: i + 1])]
    return {
        "added_ttft_p50_ms": at_rate["ttft_p50_ms"],
        "added_ttft_p99_ms": at_rate["ttft_p99_ms"],
        "added_us_per_token": round(added, 1),
        "saturation_rps": figures["rates"][unsaturated[-1]]["rate"] if unsaturated else 0.0,
        "token_p50_ms": at_rate["token_p50_ms"],
        "loop_p50_ms": at_rate["loop_p50_ms"],
        "loop_p99_ms": at_rate["loop_p99_ms"],
        "cpu_us_per_request": round(short["cpu_us_per_request"] - OUTPUT_TOKENS * added, 1),
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--profile", action="store_true", help="also say where the server's time goes")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--routing", default="cache-aware")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=list(RATES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        figures = summary(measure(arguments, console))
    except (ServerFailed, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    figures |= {"machine": machine(), "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
    arguments.results.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print_figures(figures, console)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
