"""Placement: which instance a request goes to, and whether it stays there.

Where every instance has the role "both", the router chooses and the request stays. Where there are Prefill and Decode
Pools (E5), the pool policy chooses a pair, one after the other: P on arrival, D once the prefill is done. Every
instance can do everything, so a pool that is empty is stood in for by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kllm.cluster.cache_directory import CacheDirectory
from kllm.cluster.pool_routing import Choice, PoolPolicy
from kllm.cluster.request_stream import HeldKv, RequestStream
from kllm.cluster.routing import Candidate, Router, Scores
from kllm.cluster.routing_log import Decision, weighed
from kllm.cluster.slot import Slot

Matched = tuple[int, int, int]  # tokens of a prompt that an instance has: l1, l2, l3 of Candidate
NOTHING: Matched = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """matched: what the instance has of the prompt. prefill_only: the request goes on elsewhere after its prefill.
    reason, scores (by index of the slot, least is best), candidates: why this one, as far as whoever chose says so."""

    slot: Slot
    matched: Matched
    prefill_only: bool = False
    reason: str = ""
    scores: Scores = field(default_factory=list)
    candidates: Sequence[Candidate] = ()

    def decision(self, now: float, stream: RequestStream) -> Decision:
        """For the log, before the request is submitted. now: the loop's time."""
        ahead = [candidate.prefilling for candidate in self.candidates]
        return Decision(
            time_s=now,
            request_id=stream.request.request_id,
            attempt=stream.attempt,
            prompt_tokens=len(stream.request.prompt_token_ids),
            instance=self.slot.index,
            reason=self.reason,
            l1=self.matched[0],
            l2=self.matched[1],
            l3=self.matched[2],
            spread=max(ahead) - min(ahead) if ahead else 0,
            num_candidates=len(ahead),
            candidates=weighed(self.slot.index, self.scores, self.candidates),
            handed_over=stream.kv is not None,
        )


def fittest(stream: RequestStream, slots: Sequence[Slot], sick: bool, now: float) -> Sequence[Slot]:
    """Those of `slots` that are likely to bring the request to its end. One after the other are left out, as long as
    others are there: those that cannot resume it, those that fail requests, and the one that gave it back.

    sick: there may be some that fail requests. now: the loop's time."""
    if stream.needs_resuming:
        slots = [slot for slot in slots if slot.resumes] or slots
    if sick:
        slots = [slot for slot in slots if slot.breaker.allows(now)] or slots
    if stream.given_back_by is not None:
        slots = [slot for slot in slots if slot is not stream.given_back_by] or slots
    return slots


class Placement:
    """router: where instances are alike. pools: where they have roles. directory: what they have cached, if known."""

    def __init__(self, router: Router, pools: PoolPolicy, directory: CacheDirectory | None) -> None:
        self._router = router
        self._pools = pools
        self._directory = directory

    def matched(self, stream: RequestStream, block_tokens: int) -> Callable[[int], Matched]:
        """Tokens of the prompt that an instance has, by the index of its slot."""
        if self._directory is None or stream.hashes is None:
            return lambda index: NOTHING
        matches = self._directory.matches(stream.hashes)
        l1, l2, l3 = ((part * block_tokens).tolist() for part in (matches.l1, matches.l2, matches.l3))
        return lambda index: (l1[index], l2[index], l3[index])

    def place(self, stream: RequestStream, slots: Sequence[Slot], leader: Slot | None, block_tokens: int) -> Place:
        """One of `slots`, of which there is at least one. leader: where another request computes the same prompt."""
        matched = self.matched(stream, block_tokens)
        separated = any(slot.role != "both" for slot in slots)
        if leader is not None and leader in slots and stream.kv is None:
            only = separated and leader.role == "prefill" and any(_takes(slot, leader) for slot in slots)
            return Place(leader, matched(leader.index), only, "leader")
        if len(slots) == 1:
            return Place(slots[0], matched(slots[0].index), reason="only one")
        if separated:
            return self._in_pools(stream, slots, matched)
        candidates, router = _candidates(slots, matched), self._router
        chosen = router.choose(stream.request, candidates)
        reason = router.reason(next(candidate for candidate in candidates if candidate.index == chosen))
        scores = router.scores(len(stream.request.prompt_token_ids), candidates)
        return Place(_by_index(slots, chosen), matched(chosen), reason=reason, scores=scores, candidates=candidates)

    def _in_pools(self, stream: RequestStream, slots: Sequence[Slot], matched: Callable[[int], Matched]) -> Place:
        prefill = [slot for slot in slots if slot.role != "decode"]
        decode = [slot for slot in slots if slot.role != "prefill"]
        request, outputs = stream.request, len(stream.outputs)
        if stream.kv is not None:
            taking = _candidates(_taking(stream.kv, slots) or decode or slots, matched)
            choice = self._pools.handed_over(request, outputs, stream.kv.slot.index, taking)
            return self._chosen(choice, slots, matched, taking)
        giving = _candidates(prefill or slots, matched)
        taking = _candidates([slot for slot in decode if slot.transfers], matched) if prefill else []
        if not any(slot.transfers for slot in prefill or slots):
            taking = []
        choice = self._pools.arrive(request, outputs, giving, taking)
        return self._chosen(choice, slots, matched, [*giving, *(one for one in taking if one not in giving)])

    @staticmethod
    def _chosen(
        choice: Choice, slots: Sequence[Slot], matched: Callable[[int], Matched], candidates: Sequence[Candidate]
    ) -> Place:
        slot, separate = _by_index(slots, choice.index), choice.separate
        return Place(
            slot, matched(slot.index), separate and slot.transfers, choice.reason, list(choice.scores), candidates
        )


def _takes(slot: Slot, source: Slot) -> bool:
    """Whether `slot` may go on with what `source` has prefilled."""
    return slot is not source and slot.role != "prefill" and slot.transfers and source.transfers


def _taking(kv: HeldKv, slots: Sequence[Slot]) -> list[Slot]:
    """Those that need not compute again what `kv` holds: of the Decode Pool if there are any, else of the other."""
    able = [slot for slot in slots if slot.transfers] if kv.source is not None else []
    return [slot for slot in able if slot.role != "prefill"] or able


def _candidates(slots: Sequence[Slot], matched: Callable[[int], Matched]) -> list[Candidate]:
    return [slot.candidate(matched(slot.index)) for slot in slots]


def _by_index(slots: Sequence[Slot], index: int) -> Slot:
    return next(slot for slot in slots if slot.index == index)
