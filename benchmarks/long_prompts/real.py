"""The mixed load on the real engine: a fresh server for every run, policies in turns, the same requests for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.progress import Progress

from benchmarks.long_prompts.mixed import REPORTED, MixedLoad, Seen, compare
from benchmarks.simulation_accuracy.real import ServerFailed, make_client, serve
from kllm.benchmark.client import RequestRecord
from kllm.benchmark.load import run_load
from kllm.config import EngineConfig
from kllm.hub import resolve
from kllm.tokenization.tokenizer import load_tokenizer
from kllm.workload.sample import WARM_UP, Sample, TokenSource

MODEL = "smollm2"
SHARE = 0.7  # of what the server can do
SECONDS = 150.0
SEEDS = (3, 4, 5)
PROBE_REQUESTS = 66
POLICIES = ("fcfs", "fair")
COUNTERS = ("num_prefill_yields_total", "num_preemptions_total", "num_overtakes_total")


def measure(progress: Progress, seconds: float = SECONDS) -> dict[str, Any]:
    """Raises ServerFailed."""
    return asyncio.run(_measure(progress, seconds))


async def _measure(progress: Progress, seconds: float) -> dict[str, Any]:
    saturation = await _saturation(progress)
    runs: dict[str, list[Seen]] = {policy: [] for policy in POLICIES}
    counters: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in SEEDS:
        load = MixedLoad(SHARE * saturation, seconds, seed)
        for policy in POLICIES if seed % 2 == 0 else POLICIES[::-1]:
            config = EngineConfig(model=MODEL, scheduling_policy=policy)
            task = progress.add_task(f"{policy}, seed {seed}", total=len(load.samples()))
            seen, counted = await _run(load.samples(), config, seed, lambda _, task=task: progress.advance(task))
            progress.remove_task(task)
            runs[policy].append(seen)
            counters[policy].append(counted)
    return {
        "model": MODEL,
        "saturation_rps": round(saturation, 3),
        "rate": round(SHARE * saturation, 3),
        "seconds": seconds,
        "requests_per_run": [len(run.ttft) for run in runs["fcfs"]],
        **compare(runs["fcfs"], runs["fair"]),
        "reported": REPORTED,
        "counters": counters,
    }


async def _saturation(progress: Progress) -> float:
    """Requests a second when all are there at once: the load's shares of long and short prompts, first come first."""
    samples = [replace(sample, arrival_s=0.0) for sample in MixedLoad(1.0, PROBE_REQUESTS, 99).samples()]
    task = progress.add_task("saturation", total=len(samples))
    config = EngineConfig(model=MODEL, scheduling_policy="fcfs")
    seen, _ = await _run(samples, config, 99, lambda _: progress.advance(task))
    progress.remove_task(task)
    return len(samples) / seen.duration_s


async def _run(
    samples: list[Sample], config: EngineConfig, seed: int, on_end: Callable[[RequestRecord], None]
) -> tuple[Seen, dict[str, float]]:
    vocab_size = load_tokenizer(resolve(config.model)).vocab_size
    with serve(config) as server:
        client = make_client(server, TokenSource(seed, vocab_size))
        try:
            for index in range(3):  # the first steps touch memory for the first time
                await run_load(client, [Sample((((WARM_UP, index), 64),), 8)])
            records = await run_load(client, samples, on_end=on_end)
            counters = server.metrics()
        finally:
            await client.close()
    failed = [record for record in records if not record.ok]
    if failed:
        raise ServerFailed(f"{len(failed)} requests failed, first: {failed[0].error}")
    return seen_by(samples, records), {name: counters[name] for name in COUNTERS}


def seen_by(samples: list[Sample], records: list[RequestRecord]) -> Seen:
    """The records are in the order of the samples."""
    waits = [
        (sample.input_len, record.ttft_s)
        for sample, record in zip(samples, records, strict=True)
        if record.ttft_s is not None
    ]
    return Seen(
        ttft=waits,
        tokens=sum(sample.input_len for sample in samples) + sum(record.output_tokens for record in records),
        duration_s=max(record.end_s for record in records) - min(record.sent_s for record in records),
    )
