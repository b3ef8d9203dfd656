"""The requests that an adapter has at its engine, from Submit to the last delta."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from kllm.cluster.external.completion import ChunkReader, completion_body, ended_already
from kllm.cluster.external.engine_facts import EngineFacts
from kllm.cluster.external.errors import EngineBusy, EngineFault
from kllm.cluster.external.http_engine import HttpEngine
from kllm.cluster.external.outbox import Outbox
from kllm.messages import Abort, PrefillDone, Submit
from kllm.request import Delta, FinishReason, InvalidRequest, Timings

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # before a busy engine is asked again
BUSY_PATIENCE_S = 5.0  # then it is asked a last time, and the request given back
MOST_FAILURES = 3  # of one request at this engine; then it ends with an error
IDS_REMEMBERED = 4096


@dataclass(slots=True)
class Running:
    """One attempt. sent_at: when it was sent to the engine; None while it waits for a place."""

    submit: Submit
    reader: ChunkReader
    since: float
    sent_at: float | None = None
    has_output: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.request.prompt_token_ids) + len(self.submit.outputs)


class InFlight:
    """Requests go to the engine in order of arrival, at most `most` at once.

    A request that the engine fails, or is too busy for, is given back: its last delta has finish_reason "abort", and an
    error only if it has failed; the gateway then tries again, here or elsewhere. After MOST_FAILURES it ends with an
    error. is_alive: asked when the engine fails a request: if it is gone, all are left to the gateway as they are.
    on_sent, on_answered: a request is on its way; it has ended well.
    """

    def __init__(
        self,
        engine: HttpEngine,
        facts: EngineFacts,
        outbox: Outbox,
        rng: random.Random,
        *,
        most: int,
        is_alive: Callable[[], Awaitable[bool]],
        on_sent: Callable[[Submit], None],
        on_answered: Callable[[Submit], None],
    ) -> None:
        self.steps = 0  # chunks with output
        self._engine = engine
        self._facts = facts
        self._outbox = outbox
        self._rng = rng
        self._places = asyncio.Semaphore(most)
        self._is_alive = is_alive
        self._on_sent = on_sent
        self._on_answered = on_answered
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those of aborted requests too, until they have ended
        self._attempts: dict[str, int] = {}  # the highest seen of each id, oldest first
        self._failures: dict[str, int] = {}  # by id, oldest first
        self._empty = asyncio.Event()
        self._empty.set()

    # -- what the gateway says -----------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        request_id = submit.request.request_id
        if submit.attempt <= self._attempts.get(request_id, -1):
            return  # repeated, or overtaken by a later attempt
        _remember(self._attempts, request_id, submit.attempt)
        self._cancel(request_id)
        now = asyncio.get_running_loop().time()
        running = self._running[request_id] = Running(submit, ChunkReader(submit), now)
        self._empty.clear()
        running.task = task = asyncio.create_task(self._run(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, abort: Abort) -> None:
        for request_id in abort.request_ids:
            if abort.attempt is not None:
                if self._attempts.get(request_id, -1) > abort.attempt:
                    continue
                _remember(self._attempts, request_id, abort.attempt)  # its Submit may come later
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._forget(running)
            assert running.task is not None
            running.task.cancel()

    async def close(self) -> None:
        """End all, and the engine's work on them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what can be seen ----------------------------------------------------------------------------------

    def progress(self) -> dict[str, tuple[int, int]]:
        """As EngineLoad's."""
        return {
            request_id: (running.submit.attempt, running.reader.next_index)
            for request_id, running in self._running.items()
        }

    @property
    def running(self) -> list[Running]:
        return list(self._running.values())

    async def wait_empty(self) -> None:
        await self._empty.wait()

    # -- work ----------------------------------------------------------------------------------------------

    async def _run(self, running: Running) -> None:
        """To the end of the request, or of its time here."""
        submit = running.submit
        try:
            if (ended := ended_already(submit)) is not None:
                self._end(running, ended)
                return
            body = completion_body(
                submit, self._facts.model, self._facts.max_model_len, absolute_draws=self._facts.absolute_draws
            )
            async with self._places:
                await self._complete(running, body)
        except InvalidRequest as error:
            self._end(running, _failure(running, error.message, invalid=True))
        except EngineBusy as error:
            logger.warning("request %s is given back by %s: %s", submit.request.request_id, self._engine.url, error)
            self._give_back(running, None)
        except EngineFault as error:
            if await self._is_alive():
                self._fail(running, str(error))
        except Exception as error:
            logger.exception("request %s failed at %s", submit.request.request_id, self._engine.url)
            self._end(running, _failure(running, f"internal error: {error!r}"))

    async def _complete(self, running: Running, body: bytes) -> None:
        """Again while the engine is busy, for a while. Raises InvalidRequest, EngineBusy, EngineFault."""
        loop = asyncio.get_running_loop()
        deadline, pause, last = loop.time() + BUSY_PATIENCE_S, FIRST_PAUSE_S, False
        while True:
            try:
                return await self._stream(running, body)
            except EngineBusy as busy:
                left = deadline - loop.time()
                if last or left <= 0:
                    raise
                wait = max(pause * self._rng.uniform(0.5, 1.0), busy.retry_after_s)
            last = wait >= left
            running.sent_at = None
            await asyncio.sleep(min(wait, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _stream(self, running: Running, body: bytes) -> None:
        submit, reader = running.submit, running.reader
        running.sent_at = asyncio.get_running_loop().time()
        self._on_sent(submit)
        name = f"{submit.request.request_id}-{submit.attempt}"
        try:
            async with aclosing(self._engine.complete(body, _header(name))) as chunks:
                async for data in chunks:
                    delta = reader.read(data)
                    if delta is not None:
                        self._take(running, delta)
        except (EngineFault, InvalidRequest):
            if reader.finished:
                return  # what came after the end does not matter
            raise
        if not reader.finished:
            raise EngineFault("the answer ended without a reason")

    def _take(self, running: Running, delta: Delta) -> None:
        self.steps += 1
        if not running.has_output and delta.token_ids:
            running.has_output = True
            delta = msgspec.structs.replace(delta, timings=_timings(running))
        if delta.finish_reason is not None:
            self._end(running, delta)
            return
        self._outbox.put(delta)
        if running.reader.finished:  # only its prefill was wanted
            self._forget(running)
            request_id, attempt = running.submit.request.request_id, running.submit.attempt
            self._outbox.put(PrefillDone(request_id=request_id, attempt=attempt, num_outputs=running.reader.next_index))

    def _end(self, running: Running, delta: Delta) -> None:
        self._forget(running)
        self._failures.pop(running.submit.request.request_id, None)
        self._outbox.put(delta)
        if delta.finish_reason != "error":
            self._on_answered(running.submit)

    def _fail(self, running: Running, why: str) -> None:
        request_id = running.submit.request.request_id
        failures = self._failures.get(request_id, 0) + 1
        if failures >= MOST_FAILURES:
            self._end(running, _failure(running, f"the external engine failed it {failures} times: {why}"))
            return
        logger.warning("request %s is given back by %s: %s", request_id, self._engine.url, why)
        _remember(self._failures, request_id, failures)
        self._give_back(running, why)

    def _give_back(self, running: Running, why: str | None) -> None:
        """why: what failed it; None: the engine is too busy."""
        self._forget(running)
        self._outbox.put(_last_delta(running, "abort", why))

    def _forget(self, running: Running) -> None:
        request_id = running.submit.request.request_id
        if self._running.get(request_id) is running:
            del self._running[request_id]
        if not self._running:
            self._empty.set()


def _failure(running: Running, error: str, *, invalid: bool = False) -> Delta:
    return _last_delta(running, "error", error, invalid=invalid)


def _last_delta(running: Running, reason: FinishReason, error: str | None, *, invalid: bool = False) -> Delta:
    submit = running.submit
    return Delta(
        request_id=submit.request.request_id,
        attempt=submit.attempt,
        index=running.reader.next_index,
        finish_reason=reason,
        error=error,
        invalid=invalid,
    )


def _timings(running: Running) -> Timings:
    now = asyncio.get_running_loop().time()
    sent_at = running.since if running.sent_at is None else running.sent_at
    return Timings(queue_s=sent_at - running.since, prefill_s=now - sent_at)


def _remember(values: dict[str, int], key: str, value: int) -> None:
    """Bounded: the oldest are forgotten."""
    values.pop(key, None)
    values[key] = value
    if len(values) > IDS_REMEMBERED:
        del values[next(iter(values))]


def _header(text: str) -> str:
    """What an HTTP header may hold."""
    return "".join(character for character in text if character.isascii() and character.isprintable())[:200]
