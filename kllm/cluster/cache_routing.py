"""Routers that weigh what each instance has of the prompt against what it has to do. Pure, like those of routing.py.

CacheAware is ours. The others are for comparison: what others have published, as rules over the same candidates.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kllm.cluster.routing import Candidate, Scores
from kllm.request import Request

FETCH_L2, FETCH_L3 = 0.05, 0.15  # of computing a token: what bringing it up from below costs
DECODING = 24.0  # prompt tokens that a request which decodes delays a prompt by
WORK = 3.0  # own tokens to compute count so often
DELAY = 0.02  # of computing a token: what it costs each request that is there and has to wait for it
CROWD = 16.0  # prompt tokens: what each request there costs each other one
NOISE = 0.02  # of the prompt: scores that close are equal, and drawn


def drawn(scores: Sequence[tuple[float, int]], rng: random.Random, within: float = 0.0) -> int:
    """The index with the smallest score; one of them, drawn, where several are within `within` of it."""
    least = min(score for score, _ in scores)
    best = [index for score, index in scores if score <= least + within]
    return best[0] if len(best) == 1 else best[rng.randrange(len(best))]


class Weighing(ABC):
    """A router that takes the least score; among scores within `margin` of it, one is drawn."""

    uses_cache = True

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(0)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        prompt = len(request.prompt_token_ids)
        scores = [(self.score(prompt, candidate), candidate.index) for candidate in candidates]
        return drawn(scores, self._rng, self.margin(prompt))

    def scores(self, prompt: int, candidates: Sequence[Candidate]) -> Scores:
        return [(candidate.index, self.score(prompt, candidate)) for candidate in candidates]

    def reason(self, chosen: Candidate) -> str:
        return "prefix and load" if chosen.l3 else "load"

    @abstractmethod
    def score(self, prompt: int, candidate: Candidate) -> float:
        """Of a candidate for a prompt of so many tokens; less is better."""

    def margin(self, prompt: int) -> float:
        """Scores this close to the least are as good."""
        return 0.0


class CacheAware(Weighing):
    """The least sum of what the request has to wait for and of what others there have to wait for, in prompt tokens:

        what it has to prefill before
        + own tokens that it lacks * (WORK + DELAY for each request there) + fetching those below its device
        + DECODING for each request there + CROWD for each two of them, counted both ways

    What it computes is weighed by more than its own wait (WORK): it is work that the fleet could have saved. The second
    part of the factor is the delay that a prefill is to those that decode meanwhile: a long prompt goes where few are,
    and what an instance has cached is worth more the busier it is. The last term is the delay that requests are to each
    other while they decode: it balances their number where there are many.

    A hot prefix spreads by itself: when those that have it are so busy that computing it elsewhere is quicker, it is
    computed elsewhere. The gateway counts at once what it assigns, so that a burst is spread although no report came.
    """

    def score(self, prompt: int, candidate: Candidate) -> float:
        fetched = FETCH_L2 * (candidate.l2 - candidate.l1) + FETCH_L3 * (candidate.l3 - candidate.l2)
        lacking = (prompt - candidate.l3) * (WORK + DELAY * candidate.assigned)
        decoding = candidate.assigned * (DECODING + CROWD * candidate.assigned)
        return candidate.prefilling + lacking + fetched + decoding

    def margin(self, prompt: int) -> float:
        return NOISE * prompt


class PrefixOnly(Weighing):
    """The longest match, whatever the load; ties are drawn."""

    def score(self, prompt: int, candidate: Candidate) -> float:
        return -float(candidate.l3)

    def reason(self, chosen: Candidate) -> str:
        return "longest prefix" if chosen.l3 else "no prefix anywhere"


class DynamoCost(Weighing):
    """The published cost of Dynamo's KV router, in blocks:

        max(0, (active prefill tokens + ISL) / block - credit) + decode blocks
        credit = device + 0.75 host + 0.25 disk (matched blocks)

    with its default weight of 1 for prefill and temperature 0.
    """

    def score(self, prompt: int, candidate: Candidate) -> float:
        block = max(1, candidate.block_tokens)
        credit = (candidate.l1 + 0.75 * (candidate.l2 - candidate.l1) + 0.25 * (candidate.l3 - candidate.l2)) / block
        decode_blocks = candidate.load.kv_usage * candidate.num_blocks
        return max(0.0, (candidate.prefilling + prompt) / block - credit) + decode_blocks


class SGLangCacheAware:
    """The published rule of SGLang's gateway: the shortest queue when loads differ much (by more than 64 requests and
    by half); else the best match, if it is more than 0.3 of the prompt; else the instance with the least cached."""

    uses_cache = True
    MOST_APART, MOST_RATIO, LEAST_MATCH = 64, 1.5, 0.3

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(0)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        loads = [candidate.assigned for candidate in candidates]
        if max(loads) - min(loads) > self.MOST_APART and max(loads) > self.MOST_RATIO * min(loads):
            return drawn([(float(candidate.assigned), candidate.index) for candidate in candidates], self._rng)
        best = max(candidates, key=lambda candidate: candidate.l1)
        if best.l1 > self.LEAST_MATCH * len(request.prompt_token_ids):
            return best.index
        held = [(c.num_blocks * (c.load.kv_usage + c.load.kv_cached), c.index) for c in candidates]
        return drawn(held, self._rng)

    def reason(self, chosen: Candidate) -> str:
        return "balance, prefix or room"

    def scores(self, prompt: int, candidates: Sequence[Candidate]) -> Scores:
        return []
