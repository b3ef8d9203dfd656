"""StepWork: what one step computes, as a cost model sees it; and StepTimeModel, how long that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class StepWork:
    """Sums over the rows of one step. A row computes `count` tokens after `start` tokens whose KV exists.

    rows: sequences. new_tokens: Σ count. sampled: rows whose logits are needed.
    context: Σ (start + count), the KV entries that attention reads when each row's KV is read once.
    attended: Σ over new tokens of the tokens it attends to (itself included).
    selected: the same where a token attends to at most top_k others (sparse attention); = attended without a limit.
    longest: the largest count. Where rows are spread over groups of GPUs, the group with that row is the last to end.
    """

    rows: int = 0
    new_tokens: int = 0
    sampled: int = 0
    context: int = 0
    attended: int = 0
    selected: int = 0
    longest: int = 0

    def add(self, start: int, count: int, sampled: bool, top_k: int | None = None) -> None:
        """One more row."""
        self.rows += 1
        self.new_tokens += count
        self.sampled += sampled
        self.context += start + count
        if count > self.longest:
            self.longest = count
        attended = count * start + count * (count + 1) // 2
        self.attended += attended
        self.selected += attended if top_k is None else selected_tokens(start, count, top_k)


def selected_tokens(start: int, count: int, top_k: int) -> int:
    """Σ over positions start .. start + count - 1 of min(position + 1, top_k)."""
    full = min(max(top_k - start, 0), count)  # positions whose whole prefix is attended
    return full * start + full * (full + 1) // 2 + (count - full) * top_k


def step_work(rows: Iterable[tuple[int, int, bool]], top_k: int | None = None) -> StepWork:
    """The work of rows (start, count, sampled)."""
    work = StepWork()
    for start, count, sampled in rows:
        work.add(start, count, sampled, top_k)
    return work


class StepTimeModel(Protocol):
    """Seconds that a step takes, always above 0. Pure: the same work, the same time."""

    def seconds(self, work: StepWork) -> float: ...
