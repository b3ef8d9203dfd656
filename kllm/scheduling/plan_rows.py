"""PlanRows: follows plans as a runner does, to tell what each of them computes without computing it."""

from __future__ import annotations

from kllm.costs.step import StepWork
from kllm.scheduling.plan import NewRow, Plan


class _Row:
    """computed: tokens whose KV exists. length: tokens known, those sampled by plans so far included."""

    __slots__ = ("computed", "length", "seed")

    def __init__(self, new: NewRow) -> None:
        self.computed = new.start
        self.length = len(new.tokens)
        self.seed = new.seed


class PlanRows:
    """top_k: tokens that attention is limited to (sparse attention). Plans must be given in their order."""

    def __init__(self, top_k: int | None = None) -> None:
        self._top_k = top_k
        self._rows: dict[int, _Row] = {}

    def apply(self, plan: Plan) -> tuple[StepWork, list[tuple[int, int, int]]]:
        """What the plan computes, and (row, seed, position) of every token it samples."""
        rows = self._rows
        for number in plan.ended:
            del rows[number]
        for new in plan.new:
            rows[new.row] = _Row(new)
        work = StepWork()
        sampled: list[tuple[int, int, int]] = []
        for step in plan.steps:
            row = rows[step.row]
            start = row.computed + step.skip
            row.computed = start + step.count
            work.add(start, step.count, step.sample, self._top_k)
            if step.sample:
                sampled.append((step.row, row.seed, row.length))
                row.length += 1
        return work, sampled
