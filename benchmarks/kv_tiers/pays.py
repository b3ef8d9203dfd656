"""What the tiers bring on the real engine: conversations on a KV cache that holds a quarter of what they reuse."""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from benchmarks.kv_tiers.sessions import Sessions
from benchmarks.simulation_accuracy.real import Server, ServerFailed, make_client, serve
from kllm.benchmark.client import RequestRecord
from kllm.benchmark.load import run_load
from kllm.config import EngineConfig
from kllm.hub import resolve
from kllm.telemetry.statistics import distribution
from kllm.tokenization.tokenizer import load_tokenizer
from kllm.workload.reuse import infinite_cache_hits
from kllm.workload.sample import WARM_UP, Sample, TokenSource

MODEL = "smollm2"
BLOCK = 16
PAGE_BYTES = 368_640  # of smollm2 in bfloat16
SHARE = 0.25  # of the working set that L1 holds
SATURATION_SHARE = 0.8
SPEEDUPS = (1.3, 1.6, 2.0, 2.5, 3.0)
SWEEP = (0.1, 0.5, 1.0)
QUERIES = "prefix_cache_queries_total"
HITS = "prefix_cache_tier_hits_total"


@dataclass(frozen=True)
class Seen:
    """One run. hit_rate: shares of prompt tokens, by tier. ttft_s: its distribution."""

    rate: float
    hit_rate: dict[str, float]
    ttft_s: dict[str, float]
    requests_per_s: float

    def figures(self) -> dict[str, Any]:
        return {
            "rate": round(self.rate, 3),
            "hit_rate": self.hit_rate,
            "ttft_s": {name: round(self.ttft_s[name], 3) for name in ("mean", "p50", "p95")},
            "requests_per_s": round(self.requests_per_s, 3),
        }


def measure(progress: Progress) -> dict[str, Any]:
    """Raises ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="kllm-tiers-", dir=".") as folder:
        return asyncio.run(_Measurement(progress, Path(folder)).all())


class _Measurement:
    def __init__(self, progress: Progress, folder: Path) -> None:
        self._progress = progress
        self._folder = folder
        self._load = Sessions()
        self._vocab_size = load_tokenizer(resolve(MODEL)).vocab_size
        self._blocks = self._load.working_set // BLOCK
        self._l2 = {"l2_memory": 2 * self._blocks * PAGE_BYTES}

    async def all(self) -> dict[str, Any]:
        hits, total = infinite_cache_hits(self._load.samples(math.inf), BLOCK)
        saturation = (await self._run("L1 only, saturation", math.inf, SHARE)).requests_per_s
        rate = SATURATION_SHARE * saturation
        l3 = {"l3": str(self._folder / "store")}
        runs = {
            "l1": await self._run("L1 only", rate, SHARE),
            "l1_l2": await self._run("L1 + L2", rate, SHARE, **self._l2),
            "l1_l2_l3": await self._run("L1 + L2 + L3", rate, SHARE, **self._l2, **l3),
            "restart_warm_l3": await self._run("restart, warm L3", rate, SHARE, **self._l2, **l3),
        }
        two = await self._run("two instances, one L3", rate, SHARE, instances=2, l3=str(self._folder / "shared"))
        reached = await self._equal_p95(runs["l1"])
        sweep = {
            f"{share:.0%}": (await self._run(f"L1 of {share:.0%}", rate, share, **self._l2)).figures()
            for share in SWEEP
        }
        infinite = hits / total
        total_rate = sum(runs["l1_l2"].hit_rate.values())
        return {
            "model": MODEL,
            "working_set_tokens": self._load.working_set,
            "l1_share": SHARE,
            "infinite_cache_hit_rate": round(infinite, 4),
            "saturation_rps_l1": round(saturation, 3),
            "runs": {name: seen.figures() for name, seen in runs.items()},
            "two_instances_one_store": two.figures(),
            "share_of_infinite": round(total_rate / infinite, 4),
            "hit_rate_gain_points": round(100 * (total_rate - sum(runs["l1"].hit_rate.values())), 2),
            "at_higher_rates": [seen.figures() for seen in reached],
            "rate_gain_at_equal_p95": max(
                (seen.rate / rate for seen in reached if seen.ttft_s["p95"] <= runs["l1"].ttft_s["p95"]), default=1.0
            ),
            "l1_sweep": sweep,
        }

    async def _equal_p95(self, before: Seen) -> list[Seen]:
        """Rates with L2 until the p95 TTFT is above that of L1 only."""
        reached = []
        for factor in SPEEDUPS:
            seen = await self._run(f"L1 + L2 at {factor} times the rate", factor * before.rate, SHARE, **self._l2)
            reached.append(seen)
            if seen.ttft_s["p95"] > before.ttft_s["p95"]:
                break
        return reached

    async def _run(self, title: str, rate: float, share: float, instances: int = 1, **options: Any) -> Seen:
        samples = self._load.samples(rate)
        config = EngineConfig(model=MODEL, num_kv_blocks=max(160, round(share * self._blocks)), **options)
        task = self._progress.add_task(title, total=len(samples))
        more = ["--instances", str(instances), "--routing", "round-robin"] if instances > 1 else []
        with serve(config, more) as server:
            seen = await self._send(server, samples, rate, lambda _: self._progress.advance(task))
        self._progress.remove_task(task)
        return seen

    async def _send(
        self, server: Server, samples: list[Sample], rate: float, on_end: Callable[[RequestRecord], None]
    ) -> Seen:
        client = make_client(server, TokenSource(7, self._vocab_size))
        try:
            for index in range(3):  # the first steps touch memory for the first time
                await run_load(client, [Sample((((WARM_UP, index), 64),), 8)])
            before = counters(server)
            records = await run_load(client, samples, on_end=on_end)
            after = counters(server)
        finally:
            await client.close()
        failed = [record for record in records if not record.ok]
        if failed:
            raise ServerFailed(f"{len(failed)} requests failed, first: {failed[0].error}")
        queries = after[QUERIES] - before[QUERIES]
        spread = distribution([record.ttft_s for record in records if record.ttft_s is not None])
        assert spread is not None
        duration = max(record.end_s for record in records) - min(record.sent_s for record in records)
        rates = {tier: round((after[tier] - before[tier]) / queries, 4) for tier in ("l1", "l2", "l3")}
        return Seen(rate, rates, spread, len(records) / duration)


def counters(server: Server) -> dict[str, float]:
    """Tokens looked up, and found by tier: sums over the instances."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    sums = dict.fromkeys((QUERIES, "l1", "l2", "l3"), 0.0)
    for name, labels, value in re.findall(r"^kllm:(\w+)(?:\{([^}]*)\})? (\S+)$", text, re.MULTILINE):
        tier = re.search(r'tier="(\w+)"', labels)
        if name == QUERIES:
            sums[QUERIES] += float(value)
        elif name == HITS and tier is not None:
            sums[tier[1]] += float(value)
        elif name == "prefix_cache_hits_total" and f"{HITS}{{" not in text:
            sums["l1"] += float(value)  # without lower tiers
    return sums
