"""RoutingLog: which instance each request went to, and why. Bounded, whatever the traffic; pure: time is an argument.

Every decision is counted. The latest and, so that a burst does not hide what came before it, every NTH are kept whole,
with what was known of the best candidates. What an instance later says it had of the prompt is put beside what was
believed when the request was sent there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from kllm.cluster.routing import Candidate, Scores

LATEST = 256  # decisions kept whole
NTH = 64  # of all decisions one in so many is kept for longer
SAMPLED = 256  # of those
BEST = 8  # candidates kept of a decision, and the chosen one
UNANSWERED = 8192  # decisions whose instance has not said yet what it had of the prompt
MOST_REASONS = 64  # different ones; more are counted together
OTHER = "other"


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate as it was: see Candidate. score: less is better; None if none was made."""

    instance: int
    score: float | None
    l1: int
    l2: int
    l3: int
    prefilling: int
    assigned: int


class Decision(msgspec.Struct, kw_only=True):
    """time_s: on the gateway's clock. attempt: of the request. instance: index of the slot. reason: see Router.

    l1, l2, l3: of the chosen one, as in Candidate. cached: tokens of the prompt that it then said it had; None so far.
    spread: between the most and the fewest prompt tokens that candidates had ahead. num_candidates: weighed.
    candidates: the best of them and the chosen one; none where there was nothing to choose.
    handed_over: the prompt's KV comes from where it was prefilled, so `cached` says nothing of what was known."""

    time_s: float
    request_id: str
    attempt: int
    prompt_tokens: int
    instance: int
    reason: str
    l1: int
    l2: int
    l3: int
    spread: int = 0
    num_candidates: int = 0
    candidates: list[Weighed] = []
    handed_over: bool = False
    cached: int | None = None

    @property
    def why(self) -> str:
        """A sentence, such as: prefix: 12,288 of 16,000 tokens there (4,096 of them in host memory), 2,048 ahead."""
        below = [(self.l2 - self.l1, "host memory"), (self.l3 - self.l2, "the store")]
        places = " and ".join(f"{tokens:,} of them in {place}" for tokens, place in below if tokens > 0)
        told = f"{self.reason}: {self.l3:,} of {self.prompt_tokens:,} tokens there" + (f" ({places})" if places else "")
        chosen = next((one for one in self.candidates if one.instance == self.instance), None)
        return told if chosen is None else f"{told}, {chosen.prefilling:,} ahead, {chosen.assigned} requests"


class InstanceCounts(msgspec.Struct):
    """Of one slot: decisions for it and their prompt tokens. Of those that were answered: prompt tokens (answered),
    those believed to be there (believed), those that the instance said it had (cached), and those believed to be there
    that were not (missed)."""

    decisions: int = 0
    prompt_tokens: int = 0
    answered: int = 0
    believed: int = 0
    cached: int = 0
    missed: int = 0


class RoutingCounts(msgspec.Struct):
    """Since the start. tokens: of prompts, by where they were believed to be: device, host, store, or nowhere.

    spread: sum of Decision's."""

    reasons: dict[str, int] = {}
    device: int = 0
    host: int = 0
    store: int = 0
    nowhere: int = 0
    spread: int = 0


class RoutingLog:
    def __init__(self) -> None:
        self.counts = RoutingCounts()
        self.instances: dict[int, InstanceCounts] = {}
        self.num_decisions = 0
        self._latest: deque[Decision] = deque(maxlen=LATEST)
        self._sampled: deque[Decision] = deque(maxlen=SAMPLED)
        self._unanswered: dict[str, Decision] = {}  # oldest first

    @property
    def latest(self) -> list[Decision]:
        """The last decisions, oldest first."""
        return list(self._latest)

    @property
    def sampled(self) -> list[Decision]:
        """Every NTH decision before those of `latest`, oldest first."""
        first = self._latest[0].time_s if self._latest else 0.0
        return [decision for decision in self._sampled if decision.time_s < first]

    def add(self, decision: Decision) -> None:
        """It was taken just now."""
        self._count(decision)
        self._latest.append(decision)
        if self.num_decisions % NTH == 0:
            self._sampled.append(decision)
        self._unanswered.pop(decision.request_id, None)
        if not decision.handed_over:
            self._unanswered[decision.request_id] = decision
        if len(self._unanswered) > UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def answered(self, request_id: str, cached: int) -> None:
        """The instance has begun to answer, and says how many tokens of the prompt it had."""
        decision = self._unanswered.pop(request_id, None)
        if decision is None:
            return
        decision.cached = cached
        counts = self.instances[decision.instance]
        counts.answered += decision.prompt_tokens
        counts.believed += decision.l3
        counts.cached += cached
        counts.missed += max(0, decision.l3 - cached)

    def _count(self, decision: Decision) -> None:
        counts = self.counts
        reason = decision.reason
        if reason not in counts.reasons and len(counts.reasons) >= MOST_REASONS:
            reason = OTHER
        counts.reasons[reason] = counts.reasons.get(reason, 0) + 1
        counts.spread += decision.spread
        instance = self.instances.setdefault(decision.instance, InstanceCounts())
        instance.decisions += 1
        self.num_decisions += 1
        if decision.handed_over:
            return  # its prompt has been counted where it was prefilled
        counts.device += decision.l1
        counts.host += decision.l2 - decision.l1
        counts.store += decision.l3 - decision.l2
        counts.nowhere += decision.prompt_tokens - decision.l3
        instance.prompt_tokens += decision.prompt_tokens


def weighed(chosen: int, scores: Scores, candidates: Sequence[Candidate]) -> list[Weighed]:
    """What is kept of them: those with the least scores, best first; the first ones where there are no scores."""
    if scores and len(scores) > BEST:
        scores = sorted(scores, key=lambda one: one[1])
    order: list[tuple[int, float | None]] = list(scores) or [(candidate.index, None) for candidate in candidates]
    kept = order[:BEST]
    if all(index != chosen for index, _ in kept):
        kept += [one for one in order[BEST:] if one[0] == chosen]
    by_index = {candidate.index: candidate for candidate in candidates}
    return [_weighed(by_index[index], score) for index, score in kept if index in by_index]


def _weighed(candidate: Candidate, score: float | None) -> Weighed:
    return Weighed(
        instance=candidate.index,
        score=score,
        l1=candidate.l1,
        l2=candidate.l2,
        l3=candidate.l3,
        prefilling=candidate.prefilling,
        assigned=candidate.assigned,
    )
