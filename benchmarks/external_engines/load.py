"""A load of shared prefixes through a gateway, and what the engines' own counters say of it."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.http_engine import HttpEngine
from kllm.cluster.external.launcher import ExternalLauncher
from kllm.cluster.gateway import Gateway
from kllm.cluster.routing import Router
from kllm.request import Request, SamplingParams

SETTLE_S = 2.0  # engines update their counters, and events arrive
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000


@dataclass(frozen=True)
class Shape:
    """prefixes: of prefix_tokens each, `turns` requests for each, with suffix_tokens of their own, in random order.
    at_once: requests in flight."""

    prefixes: int = 16
    turns: int = 8
    prefix_tokens: int = 384
    suffix_tokens: int = 32
    output_tokens: int = 4
    at_once: int = 4


def make_requests(shape: Shape, seed: int, name: str) -> list[Request]:
    """Prompts of random tokens, which loads of different names do not share; those of one seed have one order."""
    rng = random.Random(name)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

    prefixes = [tokens(shape.prefix_tokens) for _ in range(shape.prefixes)]
    order = [prefix for prefix in prefixes for _ in range(shape.turns)]
    random.Random(seed).shuffle(order)
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_tokens, ignore_eos=True)
    return [
        Request(request_id=f"{name}-{n}", prompt_token_ids=prefix + tokens(shape.suffix_tokens), params=params)
        for n, prefix in enumerate(order)
    ]


async def run_load(
    engines: Sequence[ExternalEngine], router: Router, requests: Sequence[Request], at_once: int, seed: int
) -> dict[str, Any]:
    """Through a gateway of its own over empty caches. hit_rate: share of prompt tokens, by the engines' counters."""
    routes: list[int] = []
    gateway = Gateway(
        [ExternalLauncher(engine) for engine in engines],
        rng=random.Random(seed),
        router=router,
        on_route=lambda request_id, attempt, index: routes.append(index),
    )
    await gateway.start()
    try:
        while not all(load.sequence for load in gateway.loads):  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.1)
        for cleared in await gateway.clear_cache():
            if not cleared.complete:
                raise ValueError(f"the cache of engine {cleared.instance} cannot be cleared: {cleared.error}")
        before = await _counters(engines)
        ttfts = await _send_all(gateway, requests, at_once)
        await asyncio.sleep(SETTLE_S)
        after = await _counters(engines)
    finally:
        await gateway.close()
    queries = [b.prefix_queries - a.prefix_queries for a, b in zip(before, after, strict=True)]
    hits = [b.prefix_hits - a.prefix_hits for a, b in zip(before, after, strict=True)]
    return {
        "hit_rate": round(sum(hits) / sum(queries), 4),
        "ttft_s": {"mean": round(statistics.fmean(ttfts), 3), "p95": round(statistics.quantiles(ttfts, n=20)[-1], 3)},
        "requests": [routes.count(index) for index in range(len(engines))],
        "computed_tokens": round(sum(queries) - sum(hits)),
    }


async def _send_all(gateway: Gateway, requests: Sequence[Request], at_once: int) -> list[float]:
    """Seconds to the first token of each."""
    loop, waiting, ttfts = asyncio.get_running_loop(), iter(requests), list[float]()

    async def client() -> None:
        for request in waiting:
            sent = loop.time()
            first = None
            async for delta in gateway.generate(request):
                first = loop.time() if first is None else first
                if delta.finish_reason == "error":
                    raise ValueError(f"request {request.request_id} failed: {delta.error}")
            assert first is not None
            ttfts.append(first - sent)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return ttfts


async def _counters(engines: Sequence[ExternalEngine]) -> list[EngineMetrics]:
    found = []
    for config in engines:
        engine = HttpEngine(config, None)
        try:
            metrics = await engine.metrics()
        finally:
            await engine.close()
        if metrics is None:
            raise ValueError(f"{config.url} has no metrics")
        found.append(metrics)
    return found
