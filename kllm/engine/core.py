"""EngineCore: plan, execute, commit. Joins the pure scheduler to an executor and to grammars.

    fill()      plan and submit until `depth` plans are in flight
    masks()     what the oldest plan lacks before it can sample, to be computed off the critical path
    commit()    take the oldest plan's result: deltas for the clients

Driven by instance_main (asyncio, behind a Link) and by the offline LLM (a plain loop). Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kllm.engine.executor import Executor, StepFuture
from kllm.engine.grammar import Grammar, GrammarMatcher
from kllm.messages import EngineLoad, Submit
from kllm.request import Delta
from kllm.scheduling.plan import Late, Plan, StepResult
from kllm.scheduling.scheduler import Scheduler


class EngineCore:
    """clock: seconds on any steady clock; only differences are used."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._in_flight: deque[tuple[Plan, StepFuture]] = deque()
        self._bound = -1  # last plan that was bound or needed no binding
        self._matchers: dict[str, GrammarMatcher] = {}
        self._outputs: dict[str, list[int]] = {}  # given with a submission whose grammar is not there yet
        self._steps = 0
        self._step_s = 0.0

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, submit: Submit) -> Delta | None:
        """Take a request; if structured, it waits for set_grammar(). Returns its last delta if it ends at once."""
        request = submit.request
        structured = request.params.structured_outputs is not None
        self._forget(request.request_id)
        delta = self.scheduler.add(submit, self._clock(), held=structured)
        if delta is None and structured:
            self._outputs[request.request_id] = submit.outputs
        return delta

    def set_grammar(self, request_id: str, grammar: Grammar) -> Delta | None:
        """The compiled grammar of a waiting request. Ignored if the request is gone."""
        outputs = self._outputs.pop(request_id, None)
        if outputs is None:
            return None
        matcher = grammar.matcher()
        if not matcher.replay(outputs):
            return self.fail(request_id, "the output so far does not match the grammar")
        self._matchers[request_id] = matcher
        self.scheduler.unhold(request_id)
        return None

    def fail(self, request_id: str, error: str, *, invalid: bool = False) -> Delta | None:
        """End a request with an error; invalid: the request is at fault. None if it is gone."""
        self._forget(request_id)
        return self.scheduler.fail(request_id, error, invalid=invalid)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self.scheduler.abort(request_ids)

    def _forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self._outputs.pop(request_id, None)

    # -- steps -----------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Plan and submit as many steps as the executor takes."""
        while len(self._in_flight) < self.executor.depth:
            plan = self.scheduler.plan(self._clock())
            if plan is None:
                return
            self._in_flight.append((plan, self.executor.submit(plan)))

    @property
    def oldest(self) -> StepFuture | None:
        """Result of the plan that commits next; None if nothing is in flight."""
        return self._in_flight[0][1] if self._in_flight else None

    def masks(self) -> dict[int, GrammarMatcher] | None:
        """Matchers by row for the oldest plan if it still has to be bound. All before it have committed, so the
        matchers have seen every token its rows depend on. The caller computes the masks and calls bind()."""
        if not self._in_flight:
            return None
        plan = self._in_flight[0][0]
        if plan.id <= self._bound or not plan.needs_bind:
            return None
        ids = self.scheduler.rows_to_bind()
        return {row: self._matchers[request_id] for row, request_id in ids.items() if request_id in self._matchers}

    def bind(self, masks: dict[int, bytes]) -> None:
        plan = self._in_flight[0][0]
        self._bound = plan.id
        self.executor.bind(plan.id, Late(masks))

    def commit(self, result: StepResult) -> list[Delta]:
        """Commit the oldest plan. Returns one delta per request that has something new."""
        self._in_flight.popleft()
        self._steps += 1
        self._step_s += result.elapsed_s
        deltas = self.scheduler.commit(result, self._clock())
        if self._matchers:
            deltas = [self._advance_grammar(delta) for delta in deltas]
        return deltas

    def _advance_grammar(self, delta: Delta) -> Delta:
        matcher = self._matchers.get(delta.request_id)
        if matcher is None:
            return delta
        if delta.finish_reason is not None:
            self._forget(delta.request_id)
            return delta
        if all(matcher.accept(token) for token in delta.token_ids):
            return delta
        failed = self.fail(delta.request_id, matcher.error or "a sampled token does not match the grammar")
        return failed if failed is not None else delta

    def step(self) -> list[Delta]:
        """One whole step, waiting for it: for callers without an event loop."""
        self.fill()
        matchers = self.masks()
        if matchers is not None:
            self.bind(compute_masks(matchers))
        return self.commit(self._in_flight[0][1].result()) if self._in_flight else []

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    def load(self) -> EngineLoad:
        return msgspec.structs.replace(self.scheduler.load(), steps=self._steps, step_s=self._step_s)

    def close(self) -> None:
        self.executor.close()


def compute_masks(matchers: dict[int, GrammarMatcher]) -> dict[int, bytes]:
    """Token masks by row. Runs on any thread; nothing else may use these matchers meanwhile."""
    return {row: matcher.mask() for row, matcher in matchers.items()}
