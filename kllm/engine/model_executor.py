"""ModelExecutor: the Executor that runs a model, on a thread of its own, one plan after the other."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from queue import SimpleQueue

from kllm.engine.runner import ModelRunner
from kllm.scheduling.plan import Late, Plan, StepResult


class ModelExecutor:
    """Executor port over a ModelRunner. Torch releases the interpreter lock while it computes, so the thread that
    plans and the thread that computes overlap where depth allows. cpu: the core to bind the computing thread to."""

    def __init__(self, runner: ModelRunner, depth: int, cpu: int | None = None) -> None:
        self.depth = depth
        self._cpu = cpu
        self._runner = runner
        self._queue: SimpleQueue[tuple[Plan, Future[StepResult]] | None] = SimpleQueue()
        self._late: dict[int, Future[Late]] = {}
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> Future[StepResult]:
        if plan.needs_bind:
            self._late[plan.id] = Future()
        done: Future[StepResult] = Future()
        done.set_running_or_notify_cancel()  # a plan is carried out whoever still waits: cancelling has no effect
        self._queue.put((plan, done))
        return done

    def bind(self, plan_id: int, late: Late) -> None:
        self._late[plan_id].set_result(late)

    def close(self) -> None:
        for late in self._late.values():
            if not late.done():
                late.set_result(Late())  # nobody will bind it any more; its results are dropped
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})  # of this thread only
        while (item := self._queue.get()) is not None:
            plan, done = item
            try:
                result = self._runner.execute(plan, lambda plan_id=plan.id: self._late[plan_id].result())  # type: ignore[misc]
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)
            self._late.pop(plan.id, None)
