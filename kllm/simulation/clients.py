"""Open-loop clients: every request is sent at its own time, and every token that comes back is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kllm.cluster.gateway import Gateway, QueueFull, Unavailable
from kllm.cluster.request_stream import End, RequestStream
from kllm.request import InvalidRequest, Request, SamplingParams
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.executor import token_at
from kllm.simulation.results import Ending, RequestOutcome
from kllm.workload.sample import Sample, TokenSource

_ENDINGS: dict[End, Ending] = {End.COMPLETED: "completed", End.ERROR: "error", End.ABORT: "abort"}


class BrokenStream(AssertionError):
    """A client got a token twice, or not at all, or a wrong one."""


class Clients:
    """patience_s: seconds after which a client leaves (None: never), by index of the sample.

    run() returns when every request has ended; outcomes are then in the order of the samples."""

    def __init__(
        self,
        gateway: Gateway,
        samples: Sequence[Sample],
        source: TokenSource,
        vocab_size: int,
        log: DecisionLog,
        patience_s: Callable[[int], float | None] = lambda index: None,
    ) -> None:
        self.ended = 0
        self.outcomes: list[RequestOutcome] = []
        self._gateway = gateway
        self._samples = samples
        self._source = source
        self._vocab_size = vocab_size
        self._log = log
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._next_turns: dict[int, list[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ended = self._loop.create_future()

    async def run(self) -> None:
        start = self._start = self._loop.time()
        first: list[tuple[float, int]] = []
        for index, sample in enumerate(self._samples):
            self.outcomes.append(RequestOutcome(index, sample.arrival_s, sample.input_len))
            if sample.after is None:
                first.append((sample.arrival_s, index))
            else:
                self._next_turns.setdefault(sample.after, []).append(index)
        for arrival, index in sorted(first):
            if start + arrival > self._loop.time():
                await asyncio.sleep(start + arrival - self._loop.time())
            self._send(index)
        if self._samples:
            await self._all_ended

    def _send(self, index: int) -> None:
        task = asyncio.create_task(self._run_one(index))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._all_ended.done() or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._all_ended.set_exception(error)
        elif self.ended == len(self._samples):
            self._all_ended.set_result(None)

    async def _run_one(self, index: int) -> None:
        outcome = self.outcomes[index]
        outcome.arrival_s = self._loop.time() - self._start
        try:
            stream = self._gateway.generate(self._request(index))
        except (QueueFull, Unavailable, InvalidRequest) as error:
            outcome.ending, outcome.detail = "refused", str(error)
        else:
            patience = self._patience_s(index)
            if patience is None:
                await self._follow(stream, outcome)
            else:
                await self._follow_for(patience, stream, outcome)
        outcome.end_s = self._loop.time() - self._start
        self._log.note("end", index, outcome.ending, outcome.output_tokens, outcome.attempts)
        self.ended += 1
        for following in self._next_turns.pop(index, ()):
            self._loop.call_later(self._samples[following].arrival_s, self._send, following)

    def _request(self, index: int) -> Request:
        sample = self._samples[index]
        params = SamplingParams(max_tokens=sample.output_len, ignore_eos=True, seed=index)
        return Request(request_id=f"{index}", prompt_token_ids=self._source.prompt(sample), params=params)

    async def _follow_for(self, patience_s: float, stream: RequestStream, outcome: RequestOutcome) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._follow(stream, outcome)
        except TimeoutError:
            await stream.aclose()
            outcome.ending = "abort"
            outcome.output_tokens = len(stream.outputs)
            self._check(stream)

    async def _follow(self, stream: RequestStream, outcome: RequestOutcome) -> None:
        """Wait for the first token, then for the end: what comes between is looked at together."""
        begin = self._loop.time()
        first = await anext(stream)
        first_at = self._loop.time()
        if first.token_ids:
            outcome.ttft_s = first_at - begin
            outcome.cached_tokens = first.num_cached_tokens
            outcome.queue_s = first.timings.queue_s if first.timings is not None else None
        await stream.wait_ended()
        received = list(first.token_ids)
        async for delta in stream:
            if delta.index != len(received):
                raise BrokenStream(f"request {outcome.index}: token {delta.index} follows token {len(received)}")
            received += delta.token_ids
            outcome.detail = delta.error or ""
        assert stream.end is not None
        outcome.ending = _ENDINGS[stream.end]
        outcome.attempts = stream.attempt + 1
        outcome.output_tokens = len(received)
        if len(received) > 1:
            outcome.tpot_s = (self._loop.time() - first_at) / (len(received) - 1)
        if received != stream.outputs:
            raise BrokenStream(f"request {outcome.index}: its client got other tokens than the gateway")
        self._check(stream)

    def _check(self, stream: RequestStream) -> None:
        """Every token is the one that belongs at its place, and a completed request has all of them."""
        request = stream.request
        seed, start, vocab_size = request.params.seed or 0, len(request.prompt_token_ids), self._vocab_size
        for place, token in enumerate(stream.outputs):
            if token != token_at(seed, start + place, vocab_size):
                raise BrokenStream(f"request {request.request_id}: a wrong token at place {place}")
        if stream.end is End.COMPLETED and len(stream.outputs) != request.params.max_tokens:
            wanted = request.params.max_tokens
            raise BrokenStream(f"request {request.request_id}: ended with {len(stream.outputs)} of {wanted} tokens")
