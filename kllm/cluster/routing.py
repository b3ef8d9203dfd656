"""Which instance gets a request. Routers are pure: no clock, no I/O; what they draw comes from their generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kllm.messages import EngineLoad
from kllm.request import Request


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that may take the request.

    index: of its slot. assigned: requests that it holds, by the gateway's own count. load: its latest report, up to a
    second old. num_blocks, block_tokens, max_num_seqs: its capacity. chunk_tokens, page_bytes: as in Hello.
    prefilling: prompt tokens that it has to compute for requests that have no output yet, by the gateway's own count.
    foreign: requests of other gateways that it holds, as of the latest report.
    prefills: how many requests those of prefilling are. unreported: the part of prefilling that came after the latest
    report; None if that is not known. holding: tokens of all requests that it holds, as they were when they were
    submitted.
    pulling: tokens whose KV has yet to come to it from other instances, of requests that have been handed over to it.
    l1, l2, l3: leading tokens of this request's prompt that its device has, that device or host memory have, and that
    those or the store have, as far as is known.
    """

    index: int
    assigned: int
    load: EngineLoad = EngineLoad()
    num_blocks: int = 0
    block_tokens: int = 0
    max_num_seqs: int = 0
    chunk_tokens: int = 0
    page_bytes: int = 0
    prefilling: int = 0
    prefills: int = 0
    foreign: int = 0
    unreported: int | None = None
    holding: int = 0
    pulling: int = 0
    l1: int = 0
    l2: int = 0
    l3: int = 0


Scores = list[tuple[int, float]]


class Router(Protocol):
    """uses_cache: it wants to know what each candidate has of the prompt."""

    uses_cache: bool

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        """The index of one of the candidates, of which there is at least one, in ascending order of index."""
        ...

    def reason(self, chosen: Candidate) -> str:
        """Why it was chosen: a few words out of a small set, by which decisions are counted."""
        ...

    def scores(self, prompt: int, candidates: Sequence[Candidate]) -> Scores:
        """(index, score) of each candidate for a prompt of so many tokens, the least is best; none if none are made."""
        ...


class RoundRobin:
    """The next candidate after the one chosen last."""

    uses_cache = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        following = (candidate.index for candidate in candidates if candidate.index > self._last)
        self._last = next(following, candidates[0].index)
        return self._last

    def reason(self, chosen: Candidate) -> str:
        return "in turn"

    def scores(self, prompt: int, candidates: Sequence[Candidate]) -> Scores:
        return []


class LeastLoaded:
    """The candidate with the fewest requests assigned; ties are drawn, so that no instance is everybody's first."""

    uses_cache = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(0)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        fewest = min(candidate.assigned for candidate in candidates)
        least = [candidate.index for candidate in candidates if candidate.assigned == fewest]
        return least[0] if len(least) == 1 else least[self._rng.randrange(len(least))]

    def reason(self, chosen: Candidate) -> str:
        return "least loaded"

    def scores(self, prompt: int, candidates: Sequence[Candidate]) -> Scores:
        return [(candidate.index, float(candidate.assigned)) for candidate in candidates]
