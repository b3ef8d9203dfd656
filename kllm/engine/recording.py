"""RecordingExecutor: any executor, with a line written for every step: what it computed and how long it took.

The lines are what step-time models are fitted from (kllm.costs.fitted), JSON, one object per step:

    {"work": {rows, new_tokens, sampled, context, attended, selected}, "seconds": …, "idle_s": …}

seconds: of the executor. idle_s: from the end of the step before to the start of this one, where a request of that step
goes on: what committing, answering and planning took. Absent otherwise, since the engine may have waited for work.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import msgspec

from kllm.costs.step import StepWork
from kllm.engine.executor import Executor, StepFuture
from kllm.scheduling.plan import Late, Plan, StepResult
from kllm.scheduling.plan_rows import PlanRows

logger = logging.getLogger(__name__)


class RecordedStep(msgspec.Struct, omit_defaults=True):
    """One line of a recording."""

    work: StepWork
    seconds: float
    idle_s: float | None = None


class RecordingExecutor:
    """Executor port around another. path: the file, replaced. Raises OSError if it cannot be written."""

    def __init__(self, executor: Executor, path: Path) -> None:
        self.depth = executor.depth
        self._executor = executor
        self._file = path.open("wb", buffering=0)  # an instance that is killed leaves what it did
        self._encode = msgspec.json.Encoder().encode
        self._rows = PlanRows()
        self._submitted: deque[tuple[StepWork, bool]] = deque()  # (work, whether the step before goes on)
        self._ended = 0.0

    def submit(self, plan: Plan) -> StepFuture:
        work, _ = self._rows.apply(plan)
        self._submitted.append((work, len(plan.new) < len(plan.steps)))
        future = self._executor.submit(plan)
        future.add_done_callback(self._on_done)
        return future

    def _on_done(self, future: StepFuture) -> None:
        """Steps end in the order of their submission, so the oldest one has."""
        work, goes_on = self._submitted.popleft()
        if future.cancelled() or future.exception() is not None:
            return
        result: StepResult = future.result()
        now = time.perf_counter()
        gap = now - result.elapsed_s - self._ended
        self._ended = now
        idle = max(gap, 0.0) if goes_on and self.depth == 1 else None
        if not self._file.closed:
            self._write(RecordedStep(work, result.elapsed_s, idle))

    def _write(self, step: RecordedStep) -> None:
        """A recording that cannot go on ends; the steps do."""
        try:
            self._file.write(self._encode(step) + b"\n")
        except OSError as error:
            logger.error("the recording of steps ends: %s: %s", self._file.name, error.strerror)
            self._file.close()

    def bind(self, plan_id: int, late: Late) -> None:
        self._executor.bind(plan_id, late)

    def close(self) -> None:
        self._executor.close()
        self._file.close()
