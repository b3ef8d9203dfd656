"""Routers that weigh matches against load: what each prefers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from support.scripted_instance import make_request

from kllm.cluster.cache_routing import CacheAware, DynamoCost, PrefixOnly, SGLangCacheAware
from kllm.cluster.routing import Candidate
from kllm.messages import EngineLoad
from kllm.request import Request

PROMPT = 1000


def request() -> Request:
    return make_request(prompt=list(range(PROMPT)))


def candidates(*each: dict[str, Any]) -> list[Candidate]:
    capacity = {"num_blocks": 1000, "block_tokens": 10, "max_num_seqs": 64, "assigned": 0}
    return [Candidate(index=index, **(capacity | fields)) for index, fields in enumerate(each)]


def test_ours_weighs_the_match_against_what_is_before() -> None:
    router = CacheAware(random.Random(0))
    assert router.choose(request(), candidates({}, {"l1": 600, "l2": 600, "l3": 600})) == 1
    busy = {"l1": 600, "l2": 600, "l3": 600, "prefilling": 2000}  # what it saves counts WORK times
    assert router.choose(request(), candidates({}, busy)) == 0
    assert router.choose(request(), candidates({"prefilling": 400}, busy)) == 1


def test_ours_spares_those_that_decode() -> None:
    """A long prompt waits rather than making many wait; where nothing is queued the fewest requests win."""
    router = CacheAware(random.Random(0))
    assert router.choose(request(), candidates({"assigned": 40}, {"assigned": 4, "prefilling": 1500})) == 1
    assert router.choose(request(), candidates({"assigned": 41}, {"assigned": 40})) == 1


def test_ours_prefers_the_nearer_tier() -> None:
    router = CacheAware(random.Random(0))
    l1, l2, l3 = {"l1": 800, "l2": 800, "l3": 800}, {"l2": 800, "l3": 800}, {"l3": 800}
    assert router.choose(request(), candidates({}, l3, l2, l1)) == 3
    assert router.choose(request(), candidates({}, l3, l2)) == 2
    assert router.choose(request(), candidates({}, l3)) == 1


def test_ours_draws_among_equals() -> None:
    router = CacheAware(random.Random(0))
    chosen = Counter(router.choose(request(), candidates({}, {}, {"prefilling": 500}, {})) for _ in range(300))
    assert set(chosen) == {0, 1, 3}
    assert min(chosen.values()) > 60


def test_prefix_only_ignores_load() -> None:
    busy = {"l1": 10, "l2": 10, "l3": 10, "prefilling": 10**6, "assigned": 60}
    assert PrefixOnly().choose(request(), candidates({}, busy)) == 1


def test_dynamo_counts_decode_blocks() -> None:
    """100 blocks of prompt; 60 matched blocks are worth as much as 60 blocks of decoding."""
    matched = {"l1": 600, "l2": 600, "l3": 600}
    router = DynamoCost(random.Random(0))
    assert router.choose(request(), candidates({}, matched | {"load": EngineLoad(kv_usage=0.055)})) == 1
    assert router.choose(request(), candidates({}, matched | {"load": EngineLoad(kv_usage=0.065)})) == 0


def test_sglang_balances_then_matches_then_takes_the_emptiest() -> None:
    router = SGLangCacheAware(random.Random(0))
    best = {"l1": 400, "l2": 400, "l3": 400}
    assert router.choose(request(), candidates({}, best)) == 1
    assert router.choose(request(), candidates({}, best | {"assigned": 65})) == 0
    little = {"l1": 200, "l2": 200, "l3": 200, "load": EngineLoad(kv_cached=0.5)}
    assert router.choose(request(), candidates({"load": EngineLoad(kv_cached=0.1)}, little)) == 0
