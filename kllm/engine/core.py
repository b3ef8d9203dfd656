"""EngineCore: plan, execute, commit. Joins the pure scheduler to an executor and to grammars.

    fill()      plan and submit until `depth` plans are in flight
    masks()     what the oldest plan lacks before it can sample, to be computed off the critical path
    commit()    take the oldest plan's result: deltas for the clients

Driven by instance_main (asyncio, behind a Link) and by the offline LLM (a plain loop). Not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from kllm.cache.tiers.lookup import Brought
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.costs.online import OnlineStepTimes
from kllm.costs.step import StepWork
from kllm.engine.executor import Executor, StepFuture
from kllm.engine.grammar import Grammar, GrammarMatcher
from kllm.messages import EngineLoad, PrefillDone, StepTimes, Submit
from kllm.request import Delta
from kllm.scheduling.plan import Late, Plan, StepResult
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.sequence import Sequence, State

PREFETCH_SHARE = 0.5  # of L1, for what was brought up for requests that still wait
KV_LEASE_S = 30.0  # from the end of a prefill to the end of its transfer
LEAST_STEP_S = 1e-6  # of any clock
LEAST_PROMPT_TOKENS = 32  # of a step, beside those that decode, to learn what computing costs


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
        self._grade = 0
        self._tiers: TieredCache | None = None
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._brought_for: dict[Sequence, int] = {}  # blocks of prompts looked up and not yet admitted
        self._step_times = OnlineStepTimes()
        self._ended_at: float | None = None  # the last step, if the next one followed without a pause

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, submit: Submit) -> Delta | None:
        """Take a request; if structured, it waits for set_grammar(). Returns its last delta if it ends at once."""
        request = submit.request
        structured = request.params.structured_outputs is not None
        self._forget(request.request_id)
        delta = self.scheduler.add(submit, self._clock(), held=structured)
        self._look_up()
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

    # -- lower tiers -----------------------------------------------------------------------------------------

    def use_tiers(self, tiers: TieredCache) -> None:
        """Look prompts up in L2 and L3 from now on. Before the first request."""
        self._tiers = tiers

    @property
    def tiers(self) -> TieredCache | None:
        return self._tiers

    def _look_up(self) -> bool:
        """Begin the lookups that the scheduler asks for. Whether one was over at once.

        What is brought for those that wait may take PREFETCH_SHARE of L1 together. Beyond that it would push out what
        was brought for others: they are looked up when their turn comes."""
        tiers, over = self._tiers, False
        for sequence in [s for s in self._brought_for if s.state in (State.RUNNING, State.ENDED)]:
            del self._brought_for[sequence]
        for sequence in self.scheduler.take_lookups():
            epoch, request = sequence.epoch, sequence.request
            if tiers is None:
                self.scheduler.found(sequence, epoch)
                over = True
                continue
            if not sequence.looking or sequence.state is State.ENDED:
                continue
            blocks = self.scheduler.kv.blocks_for(len(sequence.tokens))
            room = PREFETCH_SHARE * self.scheduler.kv.pool.num_blocks - sum(self._brought_for.values())
            if self._brought_for and blocks > room and sequence.lookups == 0:
                self.scheduler.put_off(sequence)
                over = True
                continue

            def done(brought: Brought, sequence: Sequence = sequence, epoch: int = epoch) -> None:
                self.scheduler.found(sequence, epoch, (brought.l1, brought.l2 + brought.peer, brought.l3))

            lookup = tiers.look_up(sequence.tokens, request.cache_salt, request.adapter, done, sequence.kv)
            if lookup is None:
                self.scheduler.found(sequence, epoch)
                over = True
            else:
                self._brought_for[sequence] = blocks
                self._lookups[request.request_id] = lookup
                lookup.add_done_callback(partial(self._looked_up, request.request_id))
        return over

    def take_prefilled(self) -> list[Sequence]:
        """Requests that have ended here since the last call, to go on elsewhere: hand_over() must follow for each."""
        return self.scheduler.take_prefilled()

    async def hand_over(self, sequence: Sequence) -> PrefillDone:
        """Hold the KV of such a request for whoever continues it."""
        request, kv = sequence.request, None
        if self._tiers is not None:
            lease = f"{request.request_id}/{sequence.attempt}"
            tokens = sequence.tokens[: sequence.computed]
            kv = await self._tiers.export(tokens, request.cache_salt, request.adapter, lease, KV_LEASE_S)
        return PrefillDone(
            request_id=request.request_id, attempt=sequence.attempt, num_outputs=sequence.num_outputs, kv=kv
        )

    def set_grade(self, grade: int) -> None:
        """What to give up while the fleet is short of capacity (kllm.cluster.degradation)."""
        self._grade = grade
        if self._tiers is not None:
            self._tiers.hold_writes(grade >= 1)
        self.scheduler.shrink_long_prompts(0.5 if grade >= 2 else 1.0)

    def release(self, leases: list[str]) -> None:
        """Nobody needs this KV any more (KvSource.lease)."""
        if self._tiers is not None:
            self._tiers.release(leases)

    @property
    def leases(self) -> int:
        """Of KV that others may still take from here."""
        return self._tiers.leases if self._tiers is not None else 0

    def _looked_up(self, request_id: str, lookup: asyncio.Task[None]) -> None:
        if self._lookups.get(request_id) is lookup:
            del self._lookups[request_id]

    async def clear_cache(self, *, store: bool) -> bool:
        """Forget all cached prefixes that no request uses. Whether none is left. Raises StoreError."""
        if self._tiers is not None:
            return await self._tiers.clear(store=store)
        return self.scheduler.kv.clear()

    def fail(self, request_id: str, error: str, *, invalid: bool = False) -> Delta | None:
        """End a request with an error; invalid: the request is at fault. None if it is gone."""
        self._forget(request_id)
        return self.scheduler.fail(request_id, error, invalid=invalid)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self.scheduler.abort(request_ids)

    def _forget(self, request_id: str) -> None:
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.cancel()
        self._matchers.pop(request_id, None)
        self._outputs.pop(request_id, None)

    # -- steps -----------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Plan and submit as many steps as the executor takes."""
        while len(self._in_flight) < self.executor.depth:
            plan = self.scheduler.plan(self._clock())
            over = self._look_up()  # those that lost their place
            if plan is None:
                if over:
                    continue
                if not self._in_flight:
                    self._ended_at = None
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
        plan, _ = self._in_flight.popleft()
        self._steps += 1
        self._step_s += result.elapsed_s
        now = self._clock()
        self._learn(plan.work, result.elapsed_s, now)
        deltas = self.scheduler.commit(result, now)
        if self._tiers is not None and self._tiers.transfers:
            self._stage(self._tiers)
        if self._matchers:
            deltas = [self._advance_grammar(delta) for delta in deltas]
        return deltas

    def _stage(self, tiers: TieredCache) -> None:
        """What has been computed of prompts that go on elsewhere is copied down while the rest is computed."""
        for sequence in self.scheduler.handing_over():
            if sequence.holding is not None:
                sequence.staged = tiers.export_soon(sequence.holding, sequence.staged)

    def _learn(self, work: StepWork, seconds: float, now: float) -> None:
        """How long steps take, planning and answering included where they kept the next one waiting; and what computing
        costs, from steps that mostly computed prompts."""
        since = seconds if self._ended_at is None else now - self._ended_at
        self._step_times.observe(work, max(since, seconds, LEAST_STEP_S))
        self._ended_at = now
        if self._tiers is not None and work.new_tokens >= LEAST_PROMPT_TOKENS + work.sampled:
            self._tiers.prediction.computed(work.new_tokens, work.attended, seconds)

    def _advance_grammar(self, delta: Delta) -> Delta:
        matcher = self._matchers.get(delta.request_id)
        if matcher is None:
            return delta
        if delta.finish_reason is not None:
            self._forget(delta.request_id)
            return delta
        if all(matcher.accept(token) for token in delta.token_ids):
            if self.scheduler.attempt(delta.request_id) is None:
                self._forget(delta.request_id)  # it goes on elsewhere
            return delta
        error = matcher.error or "a sampled token does not match the grammar"
        failed = self.fail(delta.request_id, error, invalid=matcher.error is not None)
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
        tiers = self._tiers.snapshot() if self._tiers is not None else None
        now = self._clock()
        return msgspec.structs.replace(
            self.scheduler.load(),
            steps=self._steps,
            step_s=self._step_s,
            tiers=tiers,
            leases=self.leases,
            grade=self._grade,
            oldest_wait_s=self.scheduler.oldest_wait(now),
            step_times=StepTimes(*self._step_times.fit(now)),
        )

    def close(self) -> None:
        self.executor.close()


def compute_masks(matchers: dict[int, GrammarMatcher]) -> dict[int, bytes]:
    """Token masks by row. Runs on any thread; nothing else may use these matchers meanwhile."""
    return {row: matcher.mask() for row, matcher in matchers.items()}
