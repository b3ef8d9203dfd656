"""What a plan computes, from the sequences that it was made of: cheaper than following plans row by row (PlanRows)."""

from __future__ import annotations

from kllm.costs.step import StepWork
from kllm.scheduling.plan import RowStep
from kllm.scheduling.sequence import Sequence


def planned_work(entries: list[tuple[Sequence, int, RowStep]]) -> StepWork:
    """What a plan computes. Its steps are counted in what the sequences have planned."""
    new_tokens = sampled = context = longest = beyond = 0
    for sequence, _, step in entries:
        count, end = step.count, sequence.planned
        new_tokens += count
        context += end
        sampled += step.sample
        if count > 1:
            beyond += (count - 1) * end - count * (count - 1) // 2  # attended to, beside what one token attends to
            longest = max(longest, count)
    attended = context + beyond
    return StepWork(len(entries), new_tokens, sampled, context, attended, attended, max(1, longest))
