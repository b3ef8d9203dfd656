"""The log of routing decisions: what is counted, what is kept, and that it stays bounded."""

from __future__ import annotations

import random
from itertools import pairwise

from support.scripted_instance import make_request

from kllm.cluster import routing_log
from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.routing import Candidate, LeastLoaded
from kllm.cluster.routing_log import BEST, LATEST, NTH, Decision, RoutingLog, weighed


def decision(number: int = 0, *, reason: str = "load", instance: int = 0, prompt: int = 100, **fields: int) -> Decision:
    matched = {"l1": 0, "l2": 0, "l3": 0} | fields
    return Decision(
        time_s=float(number),
        request_id=f"r{number}",
        attempt=0,
        prompt_tokens=prompt,
        instance=instance,
        reason=reason,
        **matched,  # type: ignore[arg-type]
    )


def test_every_decision_counts() -> None:
    log = RoutingLog()
    log.add(decision(0, l1=30, l2=50, l3=60, spread=7))
    log.add(decision(1, reason="leader", instance=2, spread=5))
    counts = log.counts
    assert counts.reasons == {"load": 1, "leader": 1}
    assert (counts.device, counts.host, counts.store, counts.nowhere) == (30, 20, 10, 140)
    assert counts.spread == 12
    assert log.instances[2].decisions == 1
    assert log.instances[0].prompt_tokens == 100


def test_what_was_believed_is_put_beside_what_was_found() -> None:
    log = RoutingLog()
    log.add(decision(0, instance=1, l1=60, l2=60, l3=60))
    log.add(decision(1, instance=1))
    log.answered("r0", 40)
    log.answered("r1", 10)
    log.answered("r1", 10)
    log.answered("unknown", 5)
    counts = log.instances[1]
    assert (counts.answered, counts.believed, counts.cached, counts.missed) == (200, 60, 50, 20)
    assert [one.cached for one in log.latest] == [40, 10]


def test_kv_that_was_handed_over_says_nothing_of_what_was_known() -> None:
    log = RoutingLog()
    log.add(decision(0))
    handed = decision(0)
    handed.handed_over = True
    log.add(handed)
    assert log.counts.nowhere == log.instances[0].prompt_tokens == 100, "a prompt counts once"
    assert log.instances[0].decisions == 2
    log.answered("r0", 96)
    assert log.instances[0].answered == 0


def test_it_is_bounded() -> None:
    log = RoutingLog()
    for number in range(100 * LATEST):
        log.add(decision(number, reason=f"reason {number % 1000}"))
    assert log.num_decisions == 100 * LATEST
    latest, sampled = log.latest, log.sampled
    assert [one.time_s for one in latest] == [float(n) for n in range(99 * LATEST, 100 * LATEST)]
    assert len(sampled) == routing_log.SAMPLED - LATEST // NTH
    assert all(b.time_s - a.time_s == NTH for a, b in pairwise(sampled))
    assert sampled[-1].time_s < latest[0].time_s
    assert len(log.counts.reasons) == routing_log.MOST_REASONS + 1
    assert sum(log.counts.reasons.values()) == log.num_decisions
    assert len(log._unanswered) == routing_log.UNANSWERED


def test_the_best_candidates_and_the_chosen_one_are_kept() -> None:
    candidates = [Candidate(index=index, assigned=0, prefilling=1000 - index) for index in range(20)]
    scores = CacheAware(random.Random(0)).scores(100, candidates)
    kept = weighed(3, scores, candidates)
    assert [one.instance for one in kept] == [19, 18, 17, 16, 15, 14, 13, 12, 3]
    assert kept[-1].prefilling == 997
    assert [one.instance for one in weighed(3, [], candidates)] == list(range(BEST))


def test_scores_are_what_routers_choose_by() -> None:
    rng = random.Random(7)
    candidates = [
        Candidate(index=index, assigned=rng.randrange(50), prefilling=rng.randrange(10**5), l1=n, l2=n, l3=n)
        for index, n in enumerate(rng.randrange(1000) for _ in range(30))
    ]
    request = make_request(prompt=list(range(1000)))
    for router in (CacheAware(random.Random(0)), LeastLoaded(random.Random(0))):
        chosen = router.choose(request, candidates)
        scores = dict(router.scores(1000, candidates))
        assert scores[chosen] <= min(scores.values()) + 0.02 * 1000


def test_why_is_a_sentence() -> None:
    candidates = [Candidate(index=0, assigned=4, prefilling=2048, l1=12_288, l2=12_288, l3=14_000)]
    one = decision(reason="prefix and load", prompt=16_000, l1=12_288, l2=12_288, l3=14_000)
    one.candidates = weighed(0, [(0, 1.0)], candidates)
    assert one.why == (
        "prefix and load: 14,000 of 16,000 tokens there (1,712 of them in the store), 2,048 ahead, 4 requests"
    )
    assert decision(reason="only one", prompt=10).why == "only one: 0 of 10 tokens there"
