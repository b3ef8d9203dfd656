"""Scheduler: plans steps and commits their results. Pure: no torch, no I/O, no clock (`now` is an argument).

There are no phases. A sequence has tokens and a number of them already planned; a plan makes sequences catch up:

    1. running sequences that lack one token (decoding), in queue order
    2. prompts, in chunks, in the order of the prefill policy: those that run, and those that wait while a place, budget
       and blocks last (Admission)

Out of blocks, the last running sequence in queue order gives its place back and is recomputed later; what it had
put into the prefix tree stays there as long as nobody needs the room.

A plan may be made while earlier ones are in flight (the overlap rule): it uses what they will do, never what they
sampled. Only commit() publishes tokens, fills the prefix tree and ends sequences.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from kllm.cache.manager import Holding, KVManager
from kllm.messages import EngineLoad, Submit
from kllm.request import Delta, FinishReason, Timings, TokenLogprobs
from kllm.scheduling.admission import Admission
from kllm.scheduling.plan import NewRow, Plan, RowResult, RowStep, StepResult
from kllm.scheduling.planned_work import planned_work
from kllm.scheduling.prefill_policy import FirstCome, PrefillPolicy
from kllm.scheduling.prefix_hits import PrefixHits
from kllm.scheduling.queue_policy import QueueKey, first_come
from kllm.scheduling.sequence import Sequence, State
from kllm.scheduling.time_slicing import TimeSlicing

LENGTH: tuple[FinishReason, int | None] = ("length", None)
MOST_LOOKUPS = 2  # of one sequence when its turn comes, beside that when it came
_NO_BLOCKS: list[int] = []  # of rows that need none: shared, never changed


class Scheduler:
    """max_tokens_per_step: budget of a plan. prefill_chunk: most prompt tokens of one sequence in a plan.

    Sequences, their holdings and the row numbers are changed here only.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_tokens_per_step: int,
        prefill_chunk: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        key: QueueKey = first_come,
        policy: PrefillPolicy | None = None,
        max_overtakes: int = 0,
        looks_up: bool = False,
        slicing: TimeSlicing | None = None,
    ) -> None:
        """looks_up: there are lower tiers; a sequence is looked up there before it waits for a place (see
        take_lookups). slicing: prompts and decoding take turns; None: they share steps."""
        self.kv = kv
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.prefill_chunk = prefill_chunk or max_tokens_per_step
        self.eos_token_ids = frozenset(eos_token_ids)
        self._key = key
        self._policy: PrefillPolicy = policy or FirstCome()
        self._admission = Admission(kv, max_overtakes)
        self._slicing = slicing
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # in queue order
        self._running: list[Sequence] = []  # in queue order
        self._in_flight: deque[tuple[Plan, list[tuple[Sequence, int, RowStep]]]] = deque()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._ended_rows: list[int] = []  # to be told to the runner with the next plan
        self._remaps: list[tuple[int, int, int]] = []
        self._arrivals = 0
        self._next_plan = 0
        self._prefilled: list[Sequence] = []
        self._committed = -1
        self._looks_up = looks_up
        self._lookups: list[Sequence] = []
        self.num_preemptions = 0
        self._hits = PrefixHits(kv.block_tokens)

    # -- coming and going ------------------------------------------------------------------------------------

    def add(self, submit: Submit, now: float, *, held: bool = False) -> Delta | None:
        """Take a request. Returns its last delta if it ends at once (it can never fit, or has all its output).

        held: it waits until unhold() (its grammar is not ready)."""
        request = submit.request
        if request.request_id in self._sequences:
            self.abort([request.request_id])  # a resubmission replaces the older attempt
        limit, error = self._limit(submit)
        if error is not None:
            return _refused(submit, error)
        try:
            sequence = Sequence(submit, self._arrivals, now, limit)
        except OverflowError:
            return _refused(submit, "a token id is no 32-bit number")
        if submit.prefill_only and len(sequence.tokens) + 1 < limit:
            sequence.limit, sequence.hands_over = len(sequence.tokens) + 1, True
        self._arrivals += 1
        over = self._finish(sequence, submit.outputs[-1]) if submit.outputs else None
        if over is not None:
            reason, stop = over
            return sequence.delta([], finish_reason=reason, stop_reason=stop)
        leader = self._sequences.get(request.leader or "")
        self._sequences[request.request_id] = sequence
        sequence.held = held
        if leader is not None and leader.computed < leader.num_prompt and self.kv.enable_prefix_caching:
            sequence.state = State.FOLLOWING
            leader.followers.append(sequence)
        else:
            self._enqueue(sequence)
        return None

    def _limit(self, submit: Submit) -> tuple[int, str | None]:
        """Tokens at which the request ends by length, and why it is refused, if it is."""
        num_prompt = len(submit.request.prompt_token_ids)
        capacity = self.kv.pool.num_blocks * self.kv.block_tokens + 1  # the last token sampled needs no KV
        wanted = submit.request.params.max_tokens
        if submit.prefill_only and num_prompt + len(submit.outputs) < capacity:
            capacity = self.max_model_len  # what comes after the next token needs no room here
        limit = self.max_model_len if wanted is None else min(self.max_model_len, num_prompt + wanted)
        if num_prompt == 0:
            return 0, "the prompt is empty"
        if num_prompt >= self.max_model_len:
            return 0, f"the prompt has {num_prompt} tokens, the model's length is {self.max_model_len}"
        if wanted is None and num_prompt < capacity:
            return min(limit, capacity), None
        if limit > capacity:
            return 0, f"prompt and output need {limit - 1} tokens of KV cache, all of it holds {capacity - 1}"
        return limit, None

    def _enqueue(self, sequence: Sequence) -> None:
        """A sequence that is neither following nor running: to be looked up below, or into the queue."""
        if self._looks_up and not sequence.wants_prompt_logprobs:
            sequence.looking = True
            self._lookups.append(sequence)
        self._hold_or_wait(sequence)

    def _hold_or_wait(self, sequence: Sequence) -> None:
        waits = not sequence.held and not sequence.looking
        sequence.state = State.WAITING if waits else State.HELD
        if waits:
            if self._policy.looks_ahead:
                sequence.expected = self.kv.cached_tokens(
                    sequence.tokens, sequence.request.cache_salt, sequence.request.adapter
                )
            insort(self._waiting, sequence, key=self._key)

    def unhold(self, request_id: str) -> None:
        """What the request was held for is there. Unknown ids (aborted meanwhile) are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.held:
            sequence.held = False
            if sequence.state is State.HELD:
                self._hold_or_wait(sequence)

    def shrink_long_prompts(self, factor: float) -> None:
        """Of their share of the KV cache, what they may have: 1 all of it."""
        self._policy.shrink_long(factor)

    def handing_over(self) -> list[Sequence]:
        """Running sequences that will go on elsewhere."""
        return [sequence for sequence in self._running if sequence.hands_over]

    def take_prefilled(self) -> list[Sequence]:
        """Sequences that have ended here since the last call, to go on elsewhere: their whole blocks are cached."""
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    def take_lookups(self) -> list[Sequence]:
        """Sequences to be looked up in the lower tiers since the last call; found() must follow for each, with the
        epoch that it has now."""
        lookups, self._lookups = self._lookups, []
        return lookups

    def put_off(self, sequence: Sequence) -> None:
        """Look it up when its turn comes, not now: what is brought too early is pushed out again."""
        sequence.looking = False
        sequence.put_off = True
        self._hold_or_wait(sequence)

    def found(self, sequence: Sequence, epoch: int, brought: tuple[int, int, int] = (0, 0, 0)) -> None:
        """L1 has what it will have of the sequence: blocks that were there, that came from L2, and from L3. Ignored if
        the sequence has ended meanwhile."""
        if sequence.epoch != epoch or sequence.state is not State.HELD or not sequence.looking:
            return
        sequence.looking = False
        sequence.brought = brought
        self._hold_or_wait(sequence)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests; unknown ids are ignored. Their blocks are free when the plans in flight now have committed."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self._end(sequence)

    def fail(self, request_id: str, error: str, *, invalid: bool = False) -> Delta | None:
        """End a request with an error from outside (its grammar). None if it is not here any more."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return sequence.delta([], finish_reason="error", error=error, invalid=invalid)

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is State.FOLLOWING:
            leader = self._sequences[sequence.request.leader or ""]
            leader.followers.remove(sequence)
        sequence.state = State.ENDED
        self._admission.forget(sequence)
        del self._sequences[sequence.request.request_id]
        self._free_followers(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give back the row and the KV of a running sequence."""
        assert sequence.holding is not None
        self.kv.close(sequence.holding, self._fence(sequence))
        self._ended_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        self._remaps = [remap for remap in self._remaps if remap[0] != sequence.row]

    def _fence(self, sequence: Sequence) -> int | None:
        """The last uncommitted plan that names the sequence's blocks."""
        return sequence.last_plan if sequence.last_plan > self._committed else None

    def _free_followers(self, leader: Sequence) -> None:
        for follower in leader.followers:
            self._enqueue(follower)
        leader.followers.clear()

    # -- plan ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None if there is nothing to compute before something commits or arrives."""
        slicing = self._slicing
        if slicing is not None:
            slicing.begin(self._running, self._waiting if len(self._running) < self.max_num_seqs else ())
        chosen = self._choose_all(now)
        if not chosen and slicing is not None and slicing.lift():
            chosen = self._choose_all(now)
        if chosen:
            plan = self._finalize(chosen)
            if slicing is not None:
                slicing.planned(now, plan.num_tokens)
            return plan
        if (self._running or self._waiting) and not (self._in_flight or self._lookups or self.kv.lent):
            raise RuntimeError("nothing can be planned though nothing is in flight: a bug in the scheduler")
        return None

    def _choose_all(self, now: float) -> dict[Sequence, int]:
        """What the next step computes of each sequence."""
        chosen: dict[Sequence, int] = {}
        self._admission.begin(self._running)
        prefilling: list[Sequence] = []
        budget = self.max_tokens_per_step
        block_tokens = self.kv.block_tokens
        decodes = self._slicing is None or self._slicing.decodes
        for sequence in self._running.copy():
            backlog = sequence.backlog
            if backlog > 1:
                prefilling.append(sequence)
            elif decodes and backlog and budget > 0 and sequence.state is State.RUNNING:
                holding = sequence.holding
                if holding is not None and sequence.planned < len(holding.blocks) * block_tokens:  # mostly
                    chosen[sequence] = 1
                    budget -= 1
                else:
                    budget -= self._choose(sequence, budget, chosen)
        if self._slicing is not None:
            budget = min(budget, self._slicing.room)
        if budget > 0:
            self._plan_prompts(prefilling, budget, chosen, now)
            self._policy.settle(chosen)
        return chosen

    def _plan_prompts(self, prefilling: list[Sequence], budget: int, chosen: dict[Sequence, int], now: float) -> None:
        """Spend what decoding left on prompts, in the policy's order."""
        admission = self._admission
        waiting = self._waiting.copy() if len(self._running) < self.max_num_seqs else []
        if waiting and admission.reserved is not None:
            budget -= self._admit(admission.reserved, budget, chosen, now)
        for sequence in self._policy.turns(prefilling, waiting):
            if budget <= 0:
                return
            if sequence.state is State.RUNNING:
                if sequence not in chosen:
                    budget -= self._choose(sequence, budget, chosen)
            elif admission.is_open and sequence.state is State.WAITING:
                budget -= self._admit(sequence, budget, chosen, now)

    def _choose(self, sequence: Sequence, budget: int, chosen: dict[Sequence, int]) -> int:
        """Give a running sequence as much of its backlog as budget and blocks allow, preempting later ones.

        Returns the budget spent, which is negative when a preempted sequence had been chosen for more."""
        holding = sequence.holding
        assert holding is not None
        backlog = sequence.backlog
        if backlog > 1 and sequence.planned == sequence.computed and not sequence.wants_prompt_logprobs:
            self._skip_cached(sequence, holding)
            backlog = sequence.backlog
        count = min(backlog, budget, self.prefill_chunk)
        if self._slicing is not None:
            count = self._slicing.limit(count, backlog)
        returned = 0
        while (blocks := self.kv.grow(holding, sequence.planned + count)) is None:
            self._admission.close()
            victim = self._running[-1]
            if self.kv.fenced or victim is sequence:
                return -returned  # room comes with a commit
            self._preempt(victim)
            returned += chosen.pop(victim, 0)
        self._admission.grew(sequence, len(blocks))
        chosen[sequence] = count
        return count - returned

    def _skip_cached(self, sequence: Sequence, holding: Holding) -> None:
        """Others may have computed what this sequence still lacks."""
        gained = self.kv.match(holding, sequence.tokens, len(sequence.tokens) - 1)
        sequence.planned += gained
        sequence.computed += gained
        if sequence.epoch == 0:
            sequence.cached = min(sequence.cached + gained, sequence.num_prompt)
            self._hits.tokens += gained

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._running.remove(sequence)
        self._leave(sequence)
        sequence.lose_place()
        self._enqueue(sequence)

    def _admit(self, sequence: Sequence, budget: int, chosen: dict[Sequence, int], now: float) -> int:
        """Give a waiting sequence a place and its first tokens, if there is room. Returns the budget spent."""
        if len(self._running) >= self.max_num_seqs:
            return 0
        opened = self._admission.try_open(sequence)
        if opened is None:
            return 0
        holding, matched = opened
        self._waiting.remove(sequence)
        if self._looks_up and self._wants_lookup(sequence, matched):
            self.kv.close(holding)
            self._hits.turned_back(sequence, matched)
            sequence.looking, sequence.put_off = True, False
            sequence.lookups += 1
            sequence.state = State.HELD
            self._lookups.append(sequence)
            return 0
        sequence.state = State.RUNNING
        sequence.holding = holding
        sequence.planned = sequence.computed = matched
        insort(self._running, sequence, key=self._key)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        if sequence.epoch == 0:
            sequence.cached = min(matched, sequence.num_prompt)
            self._hits.admitted(sequence, matched)
            self.kv.note_use(holding)
        sequence.row = self._free_rows.pop()
        count = min(sequence.backlog, budget, self.prefill_chunk)
        if self._slicing is not None:
            count = self._slicing.limit(count, sequence.backlog)
        chosen[sequence] = count
        blocks = self.kv.grow(holding, sequence.planned + count)
        if blocks is None:
            raise RuntimeError("an admitted sequence does not fit: a bug in the scheduler")
        self._admission.grew(sequence, len(blocks))
        return count

    def _wants_lookup(self, sequence: Sequence, matched: int) -> bool:
        """Its lookup was put off, or what it brought is gone again."""
        if sequence.lookups >= MOST_LOOKUPS or sequence.wants_prompt_logprobs:
            return False
        return sequence.put_off or matched // self.kv.block_tokens < sum(sequence.brought)

    def _finalize(self, chosen: dict[Sequence, int]) -> Plan:
        plan = Plan(self._next_plan, ended=self._ended_rows, remaps=self._remaps)
        self._next_plan += 1
        self._ended_rows, self._remaps = [], []
        entries: list[tuple[Sequence, int, RowStep]] = []
        for sequence, count in chosen.items():
            holding = sequence.holding
            assert holding is not None
            if sequence.sent_blocks == 0:
                plan.new.append(self._new_row(sequence, holding))
            sent = sequence.sent_blocks
            step = RowStep(
                row=sequence.row,
                count=count,
                blocks=holding.blocks[sent:] if sent < len(holding.blocks) else _NO_BLOCKS,
                sample=sequence.planned + count == sequence.target,
                skip=sequence.planned - sequence.sent_tokens,
            )
            step.bind = step.sample and sequence.params.structured_outputs is not None
            sequence.planned += count
            sequence.pending += step.sample
            sequence.sent_blocks = len(holding.blocks)
            sequence.sent_tokens = sequence.planned
            sequence.last_plan = plan.id
            plan.steps.append(step)
            entries.append((sequence, sequence.epoch, step))
        self._in_flight.append((plan, entries))
        plan.work = planned_work(entries)
        return plan

    def _new_row(self, sequence: Sequence, holding: Holding) -> NewRow:
        sequence.sent_blocks = len(holding.blocks)
        sequence.sent_tokens = sequence.planned
        return NewRow(
            row=sequence.row,
            request_id=sequence.request.request_id,
            tokens=sequence.tokens.tolist(),
            num_prompt=sequence.num_prompt,
            start=sequence.planned,
            blocks=holding.blocks.copy(),
            params=sequence.params,
            seed=sequence.params.seed or 0,
        )

    # -- commit ----------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Delta]:
        """Take the result of the oldest plan in flight: publish tokens, fill the prefix tree, end what has ended."""
        plan, entries = self._in_flight.popleft()
        if plan.id != result.plan_id:
            raise RuntimeError(f"plan {result.plan_id} completed, {plan.id} was next")
        self._committed = plan.id
        self.kv.passed(plan.id)
        if self._slicing is not None:
            self._slicing.passed(now)
        deltas: list[Delta] = []
        for sequence, epoch, step in entries:
            if sequence.epoch != epoch or sequence.state is not State.RUNNING:
                continue  # ended or preempted meanwhile
            delta = self._commit_row(sequence, step, result.rows.get(step.row) or RowResult(), now)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _commit_row(self, sequence: Sequence, step: RowStep, row: RowResult, now: float) -> Delta | None:
        sequence.computed += step.count
        if row.error is not None:
            self._end(sequence)
            return sequence.delta([], finish_reason="error", error=row.error, invalid=row.invalid)
        self._publish(sequence)
        if row.prompt_logprobs is not None:
            sequence.prompt_logprobs += row.prompt_logprobs
        if sequence.followers and sequence.computed >= sequence.num_prompt:
            self._free_followers(sequence)
        if not step.sample:
            return None
        if row.token is None:
            raise RuntimeError(f"the executor returned no token for row {step.row} of plan {self._committed}")
        return self._commit_token(sequence, row.token, row.logprobs, now)

    def _publish(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        remaps = self.kv.commit(sequence.holding, sequence.tokens, sequence.computed, self._fence(sequence))
        self._remaps += [(sequence.row, index, block) for index, block in remaps]

    def _commit_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Delta:
        sequence.pending -= 1
        sequence.tokens.append(token)
        timings = None
        if sequence.first_token_at is None:
            admitted = sequence.admitted_at if sequence.admitted_at is not None else now
            sequence.first_token_at = now
            timings = Timings(admitted - sequence.arrived_at, now - admitted)
        prompt_logprobs = None
        if sequence.num_outputs == 1 and sequence.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = []
        over = self._finish(sequence, token)
        if over == LENGTH and sequence.hands_over:
            self._end(sequence)
            self._prefilled.append(sequence)
            over = None
        reason, stop = over if over is not None else (None, None)
        if over is not None:
            self._end(sequence)
        return sequence.delta(
            [token],
            logprobs=[logprobs] if logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop,
            timings=timings,
        )

    def _finish(self, sequence: Sequence, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the sequence ends with `token`, its last one: (finish reason, stop token id)."""
        params = sequence.params
        if sequence.num_outputs >= params.min_tokens:
            # a complete grammar leaves only EOS, so ignore_eos cannot hold for structured output
            if token in self.eos_token_ids and (not params.ignore_eos or params.structured_outputs is not None):
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return LENGTH if len(sequence.tokens) >= sequence.limit else None

    # -- inspection ------------------------------------------------------------------------------------------

    def rows_to_bind(self) -> dict[int, str]:
        """Rows of the oldest plan in flight that wait for a mask, with their request ids."""
        return {step.row: sequence.request.request_id for sequence, _, step in self._in_flight[0][1] if step.bind}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def most_yields(self) -> int:
        """How often that prompt gave way which did so most often."""
        return self._policy.most_yields

    def attempt(self, request_id: str) -> int | None:
        """The attempt in which a request is here; None if it is not."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.attempt

    def progress(self) -> dict[str, tuple[int, int]]:
        """(attempt, output tokens committed so far) of every request that is here."""
        return {request_id: (s.attempt, s.num_outputs) for request_id, s in self._sequences.items()}

    def oldest_wait(self, now: float) -> float:
        """Seconds that the oldest request without a token has been here; 0 if there is none."""
        return next((max(0.0, now - s.arrived_at) for s in self._sequences.values() if s.num_outputs == 0), 0.0)

    def load(self) -> EngineLoad:
        """oldest_wait_s is left out: it needs a clock."""
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            lacking=sum(left for s in self._sequences.values() if (left := s.left) > 1),
            decoding=sum(s.left <= 1 for s in self._running),
            context=sum(s.computed for s in self._running),
            kv_usage=self.kv.usage,
            kv_cached=self.kv.cached,
            preemptions=self.num_preemptions,
            prefix_queries=self._hits.queries,
            prefix_hits=self._hits.tokens,
            l2_hits=self._hits.l2,
            l3_hits=self._hits.l3,
            wasted=self._hits.wasted,
            yields=self._policy.num_yields,
            quota_tokens=self._policy.quota_tokens,
            overtakes=self._admission.num_overtakes,
            blocked=self._admission.blocked,
        )

    def check(self) -> None:
        """Raise unless the books balance: rows, queues, progress and every block."""
        self.kv.check()
        rows = [sequence.row for sequence in self._running]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs))
        for queue, state in ((self._running, State.RUNNING), (self._waiting, State.WAITING)):
            assert [self._key(s) for s in queue] == sorted(self._key(s) for s in queue)
            assert all(s.state is state for s in queue)
        planned: dict[Sequence, list[int]] = {}
        for _, entries in self._in_flight:
            for sequence, epoch, step in entries:
                if epoch == sequence.epoch and sequence.state is State.RUNNING:
                    counts = planned.setdefault(sequence, [0, 0])
                    counts[0] += step.count
                    counts[1] += step.sample
        for sequence in self._running:
            count, samples = planned.get(sequence, [0, 0])
            assert sequence.planned == sequence.computed + count
            assert sequence.pending == samples
            assert sequence.computed <= len(sequence.tokens) <= sequence.limit
            assert sequence.holding is not None
            assert len(sequence.holding.blocks) >= self.kv.blocks_for(sequence.planned)
        for sequence in self._sequences.values():
            assert (sequence.holding is not None) == (sequence.state is State.RUNNING)
            assert sequence.state is not State.ENDED


def _refused(submit: Submit, error: str) -> Delta:
    return Delta(
        request_id=submit.request.request_id, attempt=submit.attempt, finish_reason="error", error=error, invalid=True
    )
