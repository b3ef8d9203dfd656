"""SimulatedExecutor: completes plans after the time that a cost model says they take. No weights, no arithmetic.

The token it samples is a function of the request's seed and the position alone, so that the right output of a request
is known whatever instances worked on it, and a token lost, repeated or misplaced is noticed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kllm.costs.noise import StepTimeSource
from kllm.scheduling.plan import Late, Plan, RowResult, StepResult
from kllm.scheduling.plan_rows import PlanRows
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.node import Node

_MIX = 6364136223846793005
_MASK = (1 << 64) - 1


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """The token of a request at `position` (0: the first of the prompt), as a seeded sampler's draws depend on."""
    return ((((seed + position * _MIX) & _MASK) * _MIX & _MASK) >> 33) % vocab_size


@dataclass(frozen=True)
class PlanningCost:
    """Seconds that the step loop's own process spends on a step between two of the executor's, as measured."""

    step_s: float = 0.0
    row_s: float = 0.0


class SimulatedExecutor:
    """Executor port in virtual time. depth: plans in flight.

    planning: charged before a plan can start; with depth 2 the plan before still runs meanwhile.
    top_k: tokens attended to at most (sparse attention). busy_s, rows, tokens: sums over all steps so far.
    """

    def __init__(
        self,
        node: Node,
        times: StepTimeSource,
        *,
        vocab_size: int,
        depth: int = 1,
        planning: PlanningCost = PlanningCost(),
        top_k: int | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        self.depth = depth
        self.steps = self.rows = self.tokens = 0
        self.busy_s = 0.0
        self.hung = False  # plans are taken and never completed
        self._node = node
        self._times = times
        self._vocab_size = vocab_size
        self._planning = planning
        self._plan_rows = PlanRows(top_k)
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0

    def submit(self, plan: Plan) -> asyncio.Future[StepResult]:
        work, sampled = self._plan_rows.apply(plan)
        if self._log is not None:
            found = [(row.request_id, row.start) for row in plan.new]  # tokens that the cache had of it
            self._log.note("plan", self._node.index, plan.id, found, plan.steps, plan.ended, plan.remaps)
        planned_at = self._loop.time() + self._planning.step_s + self._planning.row_s * work.rows
        start = max(planned_at, self._free_at)
        duration = self._times.draw(work) * self._node.slow
        assert duration > 0.0, "a step takes time"
        self._free_at = start + duration
        tokens = {row: RowResult(token_at(seed, position, self._vocab_size)) for row, seed, position in sampled}
        result = StepResult(plan.id, tokens, duration)
        self.steps += 1
        self.rows += work.rows
        self.tokens += work.new_tokens
        self.busy_s += duration
        done: asyncio.Future[StepResult] = self._loop.create_future()
        if not self.hung:
            self._loop.call_at(self._free_at, self._complete, done, result)
        return done

    def bind(self, plan_id: int, late: Late) -> None:
        """Masks do not change what is sampled here."""

    def close(self) -> None:
        """Nothing runs that would have to be waited for."""

    def _complete(self, done: asyncio.Future[StepResult], result: StepResult) -> None:
        if self._node.frozen:
            self._node.when_running(lambda: self._complete(done, result))
        elif not done.done():
            done.set_result(result)
