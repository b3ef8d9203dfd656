"""SchedulerLoop: a Scheduler and a SimulatedRunner in a pipeline of depth 1 or 2, with every invariant checked after
every plan and commit. It stands for the engine's step loop and for the client, who must get each token exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.simulated_runner import SimulatedRunner, grammar_mask

from kllm.cache.manager import KVManager
from kllm.messages import Submit
from kllm.request import Delta, Request, SamplingParams, StructuredOutputs, Timings, TokenLogprobs
from kllm.scheduling.plan import Late, Plan
from kllm.scheduling.queue_policy import first_come
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.sequence import Sequence

JSON = StructuredOutputs(json_object=True)


def make_request(request_id: str, prompt: list[int], **fields: object) -> Request:
    """Fields of Request by name; everything else goes to SamplingParams."""
    own = {name: fields.pop(name) for name in ("cache_salt", "adapter", "priority", "leader") if name in fields}
    params = SamplingParams(**{"seed": 0, **fields})  # type: ignore[arg-type]
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params, **own)  # type: ignore[arg-type]


@dataclass
class Client:
    """What the sender of a request has seen."""

    request: Request
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    timings: list[Timings] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    aborted: bool = False
    fresh: bool = True  # nothing of this attempt has come yet

    @property
    def last(self) -> Delta | None:
        return self.deltas[-1] if self.deltas and self.deltas[-1].finish_reason is not None else None

    @property
    def open(self) -> bool:
        return not self.aborted and self.last is None

    def take(self, delta: Delta) -> None:
        assert self.open, f"{delta} after the end"
        assert delta.attempt == self.attempt
        assert delta.index == len(self.tokens)
        assert delta.token_ids or delta.finish_reason is not None
        assert (delta.timings is not None) == (self.fresh and bool(delta.token_ids))
        if delta.timings is not None:
            assert delta.timings.queue_s >= 0
            assert delta.timings.prefill_s >= 0
            self.timings.append(delta.timings)
        if delta.logprobs is not None:
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = delta.prompt_logprobs
        self.fresh = self.fresh and not delta.token_ids
        self.tokens += delta.token_ids
        self.deltas.append(delta)


class SchedulerLoop:
    """vocab_size and eos describe the toy model, the rest is what an engine configures."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int = 4,
        depth: int = 1,
        max_model_len: int = 10_000,
        max_num_seqs: int = 8,
        max_tokens_per_step: int = 32,
        prefill_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        vocab_size: int = 48,
        eos: int = 0,
        key: object = first_come,
    ) -> None:
        self.kv = KVManager(num_blocks, block_tokens, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=max_tokens_per_step,
            prefill_chunk=prefill_chunk,
            eos_token_ids=(eos,),
            key=key,  # type: ignore[arg-type]
        )
        self.runner = SimulatedRunner(
            num_blocks,
            block_tokens,
            vocab_size=vocab_size,
            depth=depth,
            tenant=lambda request_id: (
                self.clients[request_id].request.cache_salt,
                self.clients[request_id].request.adapter,
            ),
        )
        self.depth = depth
        self.vocab_size = vocab_size
        self.eos = eos
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.plans: list[Plan] = []
        self.commits = 0
        self.ended: list[str] = []  # request ids in the order of their last deltas
        self._in_flight: list[tuple[Plan, dict[int, str]]] = []
        self._row_owner: dict[int, str] = {}
        self._first: tuple[Sequence, int, int] | None = None  # of all, its epoch, its tokens planned
        self._stalled = 0

    # -- the client ------------------------------------------------------------------------------------------

    def add(self, request: Request, *, held: bool = False) -> Client:
        client = self.clients[request.request_id] = Client(request)
        self._take(self.scheduler.add(Submit(request=request), self.now, held=held))
        return client

    def resubmit(self, client: Client) -> None:
        """As a gateway does after its instance has died: what the client has is not sampled again."""
        client.attempt += 1
        client.fresh = True
        submit = Submit(request=client.request, outputs=client.tokens.copy(), attempt=client.attempt)
        self._take(self.scheduler.add(submit, self.now))

    def abort(self, *clients: Client) -> None:
        self.scheduler.abort([client.request.request_id for client in clients])
        for client in clients:
            client.aborted = True
        self.scheduler.check()

    def fail(self, client: Client, error: str) -> None:
        self._take(self.scheduler.fail(client.request.request_id, error))

    def _take(self, delta: Delta | None) -> None:
        if delta is not None:
            self._give(delta)
        self.scheduler.check()

    def _give(self, delta: Delta) -> None:
        self.clients[delta.request_id].take(delta)
        if delta.finish_reason is not None:
            self.ended.append(delta.request_id)

    # -- the step loop ---------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Plan and submit one step."""
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        if plan is None:
            return None
        assert 0 < plan.num_tokens <= self.scheduler.max_tokens_per_step
        assert max(step.count for step in plan.steps) <= self.scheduler.prefill_chunk
        for new in plan.new:
            self._row_owner[new.row] = new.request_id
        self.runner.submit(plan)
        self.plans.append(plan)
        self._in_flight.append((plan, self._row_owner.copy()))
        return plan

    def commit(self) -> list[Delta]:
        """Execute and commit the oldest plan in flight."""
        plan, owner = self._in_flight.pop(0)
        if plan.needs_bind:
            self.runner.bind(plan.id, Late(self._masks(plan, owner)))
        result = self.runner.advance()
        self.now += 0.01
        deltas = self.scheduler.commit(result, self.now)
        self.runner.committed(plan.id)
        self.commits += 1
        for delta in deltas:
            self._give(delta)
        self.scheduler.check()
        self._check_first_gets_on()
        return deltas

    def _masks(self, plan: Plan, owner: dict[int, str]) -> dict[int, bytes]:
        return {
            step.row: grammar_mask(len(self.clients[owner[step.row]].tokens), self.vocab_size, self.eos)
            for step in plan.steps
            if step.bind
        }

    def _check_first_gets_on(self) -> None:
        """The first in queue order keeps its place and is never passed over for more than the pipeline's depth."""
        running, waiting = self.scheduler._running, self.scheduler._waiting
        first = running[0] if running else None
        if first is None or (waiting and self.scheduler._key(waiting[0]) < self.scheduler._key(first)):
            self._first = None
            return
        known = self._first
        self._first = (first, first.epoch, first.planned)
        if known is None or known[0] is not first:
            self._stalled = 0
            return
        assert known[1] == first.epoch, "the first in the queue was preempted"
        self._stalled = self._stalled + 1 if known[2] == first.planned else 0
        assert self._stalled <= self.depth + 1, "the first in the queue does not get on"

    def step(self) -> bool:
        """Fill the pipeline, then commit one plan. False when there is nothing to do."""
        while len(self._in_flight) < self.depth and self.plan() is not None:
            pass
        if not self._in_flight:
            return False
        self.commit()
        return True

    def run(self, most_steps: int = 100_000) -> None:
        """Until everything has ended."""
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {most_steps} steps")

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def check_idle(self) -> None:
        """After the end everything is available again."""
        assert self.scheduler.num_unfinished == 0
        assert self.kv.available == self.kv.pool.num_blocks
        assert self.kv.usage == 0.0
        assert not self.kv.fenced
