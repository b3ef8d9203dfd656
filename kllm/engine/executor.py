"""The Executor port: runs plans, in order. A real one runs a model; a simulated one waits for the modelled time."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from kllm.scheduling.plan import Late, Plan, StepResult

# A future of the loop where the executor shares the loop's thread (simulation), else one that any thread can wait for.
StepFuture: TypeAlias = Future[StepResult] | asyncio.Future[StepResult]


class Executor(Protocol):
    """depth: plans that may be in flight at once (1: plain, 2: the next plan is made while one runs).

    submit: FIFO; the future's exception means the executor is broken and the instance must restart.
    bind: must be called exactly once for every plan with needs_bind, after submit.
    close: waits for what runs; idempotent.
    """

    depth: int

    def submit(self, plan: Plan) -> StepFuture: ...

    def bind(self, plan_id: int, late: Late) -> None: ...

    def close(self) -> None: ...
