"""Which instance prefills a request, and which one decodes it. Pure, like routing.py: no clock, no I/O; what policies
draw comes from their generator.

    arrive ──► P (or a D that keeps it)           the pools are global: any P hands over to any D, and D is chosen
    handed_over ──► D                             when the prefill is done, by what is known then

GlobalPools is ours; pool_variants.py has others to compare it with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kllm.cluster.cache_routing import drawn
from kllm.cluster.pool_pauses import Pauses, pause_seconds
from kllm.cluster.pool_prediction import (
    Times,
    TransferCost,
    decode_seconds,
    fullness,
    outputs_ahead,
    prefill_seconds,
    step_seconds,
    transfer_seconds,
)
from kllm.cluster.routing import Candidate
from kllm.request import Request

Scores = list[tuple[int, float]]

EQUAL = 0.02  # of the time that a prompt takes: times to first token that are that close are equal, and drawn


class Choice(msgspec.Struct, frozen=True):
    """index: of the slot. separate: it is only prefilled there, and another instance is chosen for its decoding.
    reason: in words. scores: (index, score) of each that was weighed; less is better; seconds, unless reason says
    else."""

    index: int
    separate: bool
    reason: str
    scores: Scores


class PoolPolicy(Protocol):
    """uses_cache: it wants to know what each candidate has of the prompt."""

    uses_cache: bool

    def arrive(
        self, request: Request, outputs: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Choice:
        """Where a request is prefilled, of which so many outputs are there already (an earlier attempt's).

        prefill, decode: those of the two pools, in ascending order of index; an instance of both roles is in both.
        There is at least one of prefill. The index is of any of them; `separate` only where decode is not empty."""
        ...

    def handed_over(self, request: Request, outputs: int, source: int, decode: Sequence[Candidate]) -> Choice:
        """Which of decode, of which there is at least one, goes on with a request that `source` has prefilled."""
        ...


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """tpot_slo_s: seconds per output that nobody at a D should see more of; steps are kept within the share `headroom`
    of it, since predictions err and there is more to a token than its step. high_water: share of a D's KV blocks beyond
    which it is full. horizon: outputs that a request is expected to have, unless its own limit is less.
    transfer: None: neither what KV a D has nor what bringing it costs is weighed.
    conditional: a request may stay where it is prefilled."""

    tpot_slo_s: float = 0.06
    headroom: float = 0.85
    high_water: float = 0.9
    horizon: int = 256
    transfer: TransferCost | None = TransferCost()
    conditional: bool = True

    @property
    def step_s(self) -> float:
        """Longest step."""
        return self.headroom * self.tpot_slo_s


class GlobalPools:
    """P by predicted time to first token, D by what decoding there costs; all in seconds, so that they can be added.

        P     compute of what is ahead and of what it lacks of the prompt, and its steps meanwhile
        D     bringing the KV that it lacks
              + what it has to compute for others
              + outputs expected * (its step with this request + requests there * what this one adds to a step)

    The second factor's last part is the slow-down that those who are there suffer: a second of theirs weighs as much as
    a second of this request's. Guards come first: a D that would be beyond its high water, or without a place, is
    chosen only if all are (then the least full); one whose steps would be beyond the SLO only if those of all are.

    A request stays with a D that prefills it itself where that makes the sum of both stages less and those who decode
    there can bear it (Pauses): a prompt that lacks little, or one now and then where a D has little to do. Where no D
    can take another within the SLO, it may stay with a P that can.

    A hot prefix spreads by itself: when those that have it are so busy that another would be quicker, it is computed
    there too. Scores within NOISE of the least are equal, and one is drawn.
    """

    uses_cache = True

    def __init__(self, rng: random.Random | None = None, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self._pauses = Pauses()
        self._rng = rng or random.Random(0)

    def arrive(
        self, request: Request, outputs: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Choice:
        tokens = len(request.prompt_token_ids) + outputs
        times = Times((*prefill, *decode))
        scores = [(c.index, prefill_seconds(c, times.of(c), tokens)) for c in prefill]
        chosen = self._least(scores, EQUAL * tokens * times.mean.new_token)
        stays = any(c.index == chosen for c in decode)
        choice = Choice(chosen, bool(decode) and not stays, "least time to first token", scores)
        if choice.separate and self.settings.conditional:
            return self._kept(request, outputs, choice, prefill, decode, times) or choice
        return choice

    def handed_over(self, request: Request, outputs: int, source: int, decode: Sequence[Candidate]) -> Choice:
        tokens = len(request.prompt_token_ids) + outputs
        times = Times(decode)
        able, reason = self._able(decode, times, tokens)
        if not able:
            scores = [(c.index, fullness(c, tokens)) for c in decode]
            return Choice(self._least(scores), False, "all are full: the least share of KV held", scores)
        expected = outputs_ahead(request, outputs, self.settings.horizon)
        scores = [(c.index, self.decoding_cost(c, times, tokens, expected, c.index == source)) for c in able]
        return Choice(self._least(scores), False, reason, scores)

    def decoding_cost(self, candidate: Candidate, times: Times, tokens: int, expected: int, there: bool) -> float:
        """Seconds, of this request and of those that are there. there: it has the KV itself."""
        cost = decode_seconds(candidate, times.decoding(candidate), tokens, expected)
        if self.settings.transfer is None or there:
            return cost
        return cost + transfer_seconds(candidate, times.of(candidate), tokens, self.settings.transfer)

    def _kept(
        self,
        request: Request,
        outputs: int,
        separated: Choice,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        times: Times,
    ) -> Choice | None:
        """That the request stays where it is prefilled, if that is better than to separate it."""
        tokens = len(request.prompt_token_ids) + outputs
        expected = outputs_ahead(request, outputs, self.settings.horizon)
        apart = min(score for _, score in separated.scores)
        apart += min(self.decoding_cost(c, times, tokens, expected, False) for c in decode)
        slo, quick = self.settings.step_s, self._quick(self._roomy(decode, tokens), times, tokens)
        able = [c for c in quick if self._pauses.bears(c, times.decoding(c), tokens, slo)]
        if not quick:
            calm = self._quick(self._roomy(prefill, tokens), times, tokens)
            able += [c for c in calm if self._pauses.bears(c, times.decoding(c), tokens, slo)]
        scores = [(c.index, self._staying_cost(c, times, tokens, expected)) for c in able]
        if not scores or min(score for _, score in scores) >= apart:
            return None
        chosen = self._least(scores)
        kept = next(c for c in able if c.index == chosen)
        self._pauses.taken(kept, times.decoding(kept), tokens, slo)
        return Choice(chosen, False, "it stays: quicker than two stages", scores)

    def _staying_cost(self, candidate: Candidate, times: Times, tokens: int, expected: int) -> float:
        """Seconds, of this request; a pause of those who decode there counts as one of its own."""
        later = times.decoding(candidate)
        pause = pause_seconds(candidate, later, tokens, self.settings.step_s)
        prefill = prefill_seconds(candidate, times.of(candidate), tokens)
        return prefill + decode_seconds(candidate, later, tokens, expected) + pause

    def _roomy(self, candidates: Sequence[Candidate], tokens: int) -> list[Candidate]:
        return [c for c in candidates if fullness(c, tokens) <= self.settings.high_water]

    def _quick(self, candidates: Sequence[Candidate], times: Times, tokens: int) -> list[Candidate]:
        return [c for c in candidates if step_seconds(c, times.decoding(c), tokens) <= self.settings.step_s]

    def _able(self, decode: Sequence[Candidate], times: Times, tokens: int) -> tuple[list[Candidate], str]:
        """Those that pass the guards, and how they are weighed; none if all are full."""
        roomy = self._roomy(decode, tokens)
        quick = self._quick(roomy, times, tokens)
        if quick:
            return quick, "least delay, of it and of those there"
        return roomy, "least delay, though steps are beyond the SLO everywhere"

    def _least(self, scores: Scores, within: float = 0.0) -> int:
        return drawn([(score, index) for index, score in scores], self._rng, within)
