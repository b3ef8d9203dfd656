"""What a decision costs: for a prompt of 128,000 tokens over 64 instances, and the size of the index.

A decision is what the gateway does between a request's arrival and its submission: look up what every instance has of
the prompt, make the candidates, choose, log it with all scores, and expect the prompt where it is sent. The hashing of
the prompt is left out: Workers do it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from rich.console import Console

from kllm.cluster.cache_directory import CacheDirectory
from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.prefix_index import Hashes
from kllm.cluster.routing import Candidate
from kllm.cluster.routing_log import Decision, RoutingLog, weighed
from kllm.messages import CacheChange, CacheDump, Hello
from kllm.request import Request, SamplingParams

INSTANCES, BLOCKS_EACH = 64, 125_000
PROMPT_TOKENS, BLOCK_TOKENS = 128_000, 16
NEW_BLOCKS = 500  # at a prompt's end
DECISIONS = 400
LARGE_INSTANCES, LARGE_BLOCKS = 8, 1_000_000


def filled(instances: int, blocks: int, rng: np.random.Generator, prompt: Hashes | None = None) -> CacheDirectory:
    """A directory of instances that hold so many blocks each, none in common; and of a prompt another share each, the
    last one all of it."""
    directory = CacheDirectory(instances)
    hello = Hello(instance_id="i", incarnation="1", num_blocks=blocks, block_tokens=BLOCK_TOKENS, fingerprint="f")
    for index in range(instances):
        directory.joined(index, hello, instances * blocks)
    for index in range(instances):
        held = rng.integers(1, 2**63, blocks, dtype=np.uint64)
        if prompt is not None:
            held = np.concatenate((held, prompt[: (index + 1) * len(prompt) // instances]))
        change = CacheChange(1, True, held.astype(">u8").tobytes())
        assert directory.heard(index, CacheDump(sequence=0, changes=[change]))
    return directory


def decision_times() -> dict[str, float]:
    """Milliseconds of processor time of a decision; every instance has another share of the prompt, and the last
    sixteenth is new each time."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 2**63, PROMPT_TOKENS // BLOCK_TOKENS, dtype=np.uint64)
    directory = filled(INSTANCES, BLOCKS_EACH, rng, prompt)
    router, log = CacheAware(random.Random(0)), RoutingLog()
    request = Request(request_id="r", prompt_token_ids=[1] * PROMPT_TOKENS, params=SamplingParams())
    times = []
    for number in range(DECISIONS):
        prompt = np.concatenate((prompt[:-NEW_BLOCKS], rng.integers(1, 2**63, NEW_BLOCKS, dtype=np.uint64)))
        began = time.thread_time()
        chosen = decide(directory, prompt, request, router, log, float(number))
        directory.routed(chosen, prompt, float(number))
        times.append(1e3 * (time.thread_time() - began))
    p50, p99 = np.percentile(times, (50, 99))
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3), "max_ms": round(max(times), 3)}


def decide(
    directory: CacheDirectory, prompt: Hashes, request: Request, router: CacheAware, log: RoutingLog, now: float
) -> int:
    """The index chosen."""
    matches = directory.matches(prompt)
    l1, l2, l3 = ((part * BLOCK_TOKENS).tolist() for part in (matches.l1, matches.l2, matches.l3))
    candidates = [
        Candidate(index=i, assigned=20, prefilling=5000, block_tokens=BLOCK_TOKENS, l1=l1[i], l2=l2[i], l3=l3[i])
        for i in range(INSTANCES)
    ]
    chosen = router.choose(request, candidates)
    scores = router.scores(PROMPT_TOKENS, candidates)
    log.add(
        Decision(
            time_s=now,
            request_id=f"r{now}",
            attempt=0,
            prompt_tokens=PROMPT_TOKENS,
            instance=chosen,
            reason=router.reason(candidates[chosen]),
            l1=l1[chosen],
            l2=l2[chosen],
            l3=l3[chosen],
            num_candidates=len(candidates),
            candidates=weighed(chosen, scores, candidates),
        )
    )
    return chosen


def measure(console: Console) -> dict[str, Any]:
    with console.status("decisions"):
        times = decision_times()
    with console.status("size"):
        directory = filled(LARGE_INSTANCES, LARGE_BLOCKS, np.random.default_rng(2))
    pairs = sum(directory.known(index).device_blocks for index in range(LARGE_INSTANCES))
    size = {"instances": LARGE_INSTANCES, "blocks_each": LARGE_BLOCKS, "pairs": pairs, "bytes": directory.bytes_used}
    size["bytes_per_pair"] = round(directory.bytes_used / pairs, 2)
    console.print(f"a decision: {times}\nthe index: {size}")
    return {"instances": INSTANCES, "prompt_tokens": PROMPT_TOKENS, "decision": times, "index": size}
