"""The real engine: a fresh server for every run, a load sent to it over HTTP, and what its clients and it recorded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.simulation_accuracy.loads import Load
from kllm.benchmark.client import CompletionClient, RequestRecord
from kllm.benchmark.load import run_load
from kllm.config import EngineConfig
from kllm.engine.recording import RecordedStep
from kllm.hub import resolve
from kllm.tokenization.tokenizer import load_tokenizer
from kllm.workload.sample import WARM_UP, Sample, TokenSource

READY = re.compile(r"kLLM is ready: (\S+) serves (\S+),")
METRIC = re.compile(r"^kllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
INSIDE = ("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum")
START_S = 300.0
STOP_S = 60.0
TIMEOUT_S = 600.0
WARM_UPS = 3  # requests: the first steps touch memory for the first time


class ServerFailed(RuntimeError):
    """The server did not start, or a request failed; the message says what it said."""


class Latencies(msgspec.Struct):
    """What the clients of one run saw. tpot_s: of outputs of more than one token. tokens: of all outputs.
    duration_s: from the first request's sending to the last one's end."""

    ttft_s: list[float]
    tpot_s: list[float]
    tokens: int
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s


class Run(msgspec.Struct):
    """One load on one fresh server. inside_s: mean time of a request from reaching the instance to its first token."""

    load: Load
    repeat: int
    rate: float
    num_blocks: int
    max_model_len: int
    vocab_size: int
    seen: Latencies
    inside_s: float
    steps: list[RecordedStep]


@dataclass(frozen=True)
class Server:
    """A ready server. recording: file that its steps are written to."""

    url: str
    model: str
    recording: Path

    def metrics(self) -> dict[str, float]:
        """Samples by name; of those with labels the last."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return {name: float(value) for name, value in METRIC.findall(text)}

    def num_blocks(self) -> int:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(r'num_gpu_blocks="(\d+)"', text)
        if found is None:
            raise ServerFailed(f"{self.url}/metrics does not tell the number of KV blocks")
        return int(found[1])

    def max_model_len(self) -> int:
        return int(httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["max_model_len"])


@contextmanager
def serve(config: EngineConfig, more: Sequence[str] = ()) -> Iterator[Server]:
    """A server of its own, stopped at the end. more: further flags of `kllm serve`. Raises ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="kllm-accuracy-") as folder:
        recording = Path(folder) / "steps.jsonl"
        knobs = config.model_dump(exclude_defaults=True, exclude={"model"})
        flags = [part for name, value in knobs.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "kllm.cli", "serve", config.model, "--port", "0", "--log-level", "error"]
        process = subprocess.Popen(
            [*command, "--record-steps", str(recording), *flags, *more],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            ready = READY.match(process.stdout.readline())
            if ready is None:
                raise ServerFailed(f"the server did not start, status {process.wait()}")
            watchdog.cancel()
            yield Server(ready[1], ready[2], recording)
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            finally:
                process.kill()
                process.communicate()


async def record(
    load: Load, rate: float, repeat: int, config: EngineConfig, on_end: Callable[[RequestRecord], None]
) -> Run:
    """Send the load to a fresh server. Raises ServerFailed if any request fails."""
    samples = load.samples(rate, repeat)
    vocab_size = load_tokenizer(resolve(config.model)).vocab_size
    with serve(config) as server:
        client = make_client(server, TokenSource(prompt_seed(load, repeat), vocab_size))
        try:
            await _warm_up(client)
            skipped, before = server.recording.stat().st_size, server.metrics()
            records = await run_load(client, samples, on_end=on_end)
            after = server.metrics()
        finally:
            await client.close()
        failed = [record for record in records if not record.ok]
        if failed:
            raise ServerFailed(f"load {load.name}: {len(failed)} requests failed, first: {failed[0].error}")
        return Run(
            load=load,
            repeat=repeat,
            rate=rate,
            num_blocks=server.num_blocks(),
            max_model_len=server.max_model_len(),
            vocab_size=vocab_size,
            seen=latencies(records),
            inside_s=sum(after[name] - before[name] for name in INSIDE) / len(records),
            steps=read_steps(server.recording, skipped),
        )


def prompt_seed(load: Load, repeat: int) -> int:
    return load.seed + 1000 * repeat


def make_client(server: Server, source: TokenSource) -> CompletionClient:
    """Every token comes as a chunk, whether or not it completes a character (return_token_ids)."""
    options = {"temperature": 0.0, "return_token_ids": True}
    return CompletionClient(server.url, server.model, None, TIMEOUT_S, options, source.prompt)


async def _warm_up(client: CompletionClient) -> None:
    for index in range(WARM_UPS):
        (done,) = await run_load(client, [Sample((((WARM_UP, index), 64),), 8)])
        if not done.ok:
            raise ServerFailed(f"the first request failed: {done.error} {done.detail}")


def latencies(records: Sequence[RequestRecord]) -> Latencies:
    return Latencies(
        ttft_s=[record.ttft_s for record in records if record.ttft_s is not None],
        tpot_s=[record.tpot_s for record in records if record.tpot_s is not None],
        tokens=sum(record.output_tokens for record in records),
        duration_s=max(record.end_s for record in records) - min(record.sent_s for record in records),
    )


def read_steps(path: Path, skipped_bytes: int = 0) -> list[RecordedStep]:
    """The steps recorded in a file, those after its first `skipped_bytes` bytes."""
    decode = msgspec.json.Decoder(RecordedStep).decode
    return [decode(line) for line in path.read_bytes()[skipped_bytes:].splitlines()]
