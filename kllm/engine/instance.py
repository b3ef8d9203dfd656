"""instance_main: an engine behind a Link. The same coroutine serves in its own process, in tests and in simulation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from kllm.cache.stores.store import StoreError
from kllm.engine.cache_reports import CacheReporter, change
from kllm.engine.core import EngineCore, compute_masks
from kllm.engine.event_feed import EventFeed
from kllm.engine.grammar import GrammarCompiler
from kllm.messages import (
    Abort,
    CacheChange,
    CacheCleared,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    Failed,
    Hello,
    Ping,
    PrefillDone,
    Release,
    Role,
    SetGrade,
    SetRole,
    Submit,
    Up,
    WatchCache,
)
from kllm.request import Delta, InvalidRequest
from kllm.scheduling.sequence import Sequence
from kllm.transport.link import Backpressure, Link, LinkClosed

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 1.0  # also the sign of life while a long step runs
BACKPRESSURE_PAUSE_S = 0.01
LEASE_S = 60.0
HAND_OVER_S = 5.0  # to make KV ready for others, at most
TIERS_GRACE_S = 5.0  # at the end, for blocks on their way to the store
IDS_REMEMBERED = 4096  # submitted last: a repeated or late Submit of one that has ended is recognised

T = TypeVar("T")


class Workers(Protocol):
    """Runs CPU-heavy work off the event loop."""

    async def run(self, function: Callable[..., T], *args: object) -> T: ...


class ThreadWorkers:
    """Workers on asyncio's thread pool."""

    async def run(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.to_thread(function, *args)


async def instance_main(
    link: Link[Down, Up],
    core: EngineCore,
    compiler: GrammarCompiler | None,
    workers: Workers,
    hello: Hello,
    *,
    lease_s: float = LEASE_S,
    feed: EventFeed | None = None,
    reporter: CacheReporter | None = None,
) -> None:
    """Serve one gateway until it drains us (returns), is gone (returns) or the executor fails (raises).

    feed: where cache events go, for its counts. reporter: tells the gateway what is cached. The gateway is gone when
    the link closes, or when after its first Ping it has said nothing for lease_s seconds."""
    await Instance(link, core, compiler, workers, lease_s, feed, reporter).run(hello)


class Instance:
    """Three tasks: messages in, steps, load reports out. They share the core on one event loop.

    The link may lose, repeat and reorder messages (see kllm.messages)."""

    def __init__(
        self,
        link: Link[Down, Up],
        core: EngineCore,
        compiler: GrammarCompiler | None,
        workers: Workers,
        lease_s: float = LEASE_S,
        feed: EventFeed | None = None,
        reporter: CacheReporter | None = None,
    ) -> None:
        self._link = link
        self._core = core
        self._compiler = compiler
        self._workers = workers
        self._lease_s = lease_s
        self._feed = feed
        self._reporter = reporter
        self._heard = False  # the gateway has said something
        self._leased = False  # it pings
        self._quiet_s = 0.0  # since it said something, in report intervals: a process that stood still heard nothing
        self._reports = 0
        self._attempts: dict[str, int] = {}  # the highest seen of each id, oldest first
        self._work = asyncio.Event()
        self._draining = False
        self._role: Role = "both"
        self._term = 0
        self._handing_over: dict[str, tuple[int, int]] = {}  # request id -> (attempt, outputs)
        self._clearing: set[str] = set()  # tokens of ClearCache being worked on
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, hello: Hello) -> None:
        self._role, self._term = hello.role, hello.term
        tiers = self._core.tiers
        if tiers is not None:
            tiers.wake = self._work.set
            tiers.start()
        if self._reporter is not None:
            self._reporter.connect(self._try_to_send, self._cached)
        tasks = [asyncio.ensure_future(work) for work in (self._receive(), self._step_loop(), self._report(hello))]
        try:
            await self._send(hello)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LinkClosed:
            pass  # the gateway is gone; whoever started us decides what happens next
        except Exception as error:
            await self._send_last(Failed(error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
            if tiers is not None:
                await tiers.close(TIERS_GRACE_S)  # before the link: whoever sees that end may end the process
            self._link.close()

    # -- messages --------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._link.recv()
            self._heard, self._quiet_s = True, 0.0
            match message:
                case Submit():
                    await self._submit(message)
                case Abort():
                    self._abort(message)
                case Release():
                    self._core.release(message.leases)
                case SetRole():
                    if message.term > self._term:
                        self._role, self._term = message.role, message.term
                    await self._send_load(progress=False)
                case SetGrade():
                    self._core.set_grade(message.grade)
                case Drain():
                    self._draining = True
                case WatchCache():
                    if self._reporter is not None:
                        self._reporter.watch()
                    continue
                case ClearCache():
                    self._beside(self._clear_cache(message))
                case Ping():
                    self._leased = True
                    continue
            self._work.set()

    async def _clear_cache(self, message: ClearCache) -> None:
        if message.token in self._clearing:
            return  # asked again: there will be one answer
        self._clearing.add(message.token)
        error = None
        complete = False
        try:
            complete = await self._core.clear_cache(store=message.store)
        except StoreError as failed:
            error = str(failed)
        finally:
            self._clearing.remove(message.token)
        await self._send(CacheCleared(token=message.token, complete=complete and error is None, error=error))

    def _abort(self, abort: Abort) -> None:
        if abort.attempt is None:
            self._core.abort(abort.request_ids)
            return
        for request_id in abort.request_ids:
            if self._attempt(request_id) <= abort.attempt:
                self._core.abort([request_id])
                self._remember(request_id, abort.attempt)  # its Submit may come later

    def _attempt(self, request_id: str) -> int:
        """The highest attempt of this id seen so far; -1 if it is new."""
        held = self._core.scheduler.attempt(request_id)
        return self._attempts.get(request_id, -1) if held is None else held

    def _remember(self, request_id: str, attempt: int) -> None:
        self._attempts.pop(request_id, None)
        self._attempts[request_id] = attempt
        if len(self._attempts) > IDS_REMEMBERED:
            del self._attempts[next(iter(self._attempts))]

    async def _submit(self, submit: Submit) -> None:
        request_id = submit.request.request_id
        if submit.attempt <= self._attempt(request_id):
            return  # repeated, or overtaken by a later attempt
        self._remember(request_id, submit.attempt)
        delta = self._core.add(submit)
        if delta is not None:
            await self._send(Deltas(items=[delta]))
        elif submit.request.params.structured_outputs is not None:
            self._beside(self._compile(submit))

    def _begin_to_hand_over(self, sequence: Sequence) -> None:
        """It counts as held from now on: an instance that drains waits for it."""
        held = self._handing_over[sequence.request.request_id] = (sequence.attempt, sequence.num_outputs)
        self._beside(self._hand_over(sequence, held))

    async def _hand_over(self, sequence: Sequence, held: tuple[int, int]) -> None:
        """Say where the KV of a request is that goes on elsewhere."""
        request_id = sequence.request.request_id
        attempt, num_outputs = held
        try:
            try:
                async with asyncio.timeout(HAND_OVER_S):
                    done = await self._core.hand_over(sequence)
            except Exception:  # a timeout too: whoever goes on with it computes it
                logger.exception("KV of request %s cannot be handed over", request_id)
                done = PrefillDone(request_id=request_id, attempt=attempt, num_outputs=num_outputs)
            await self._send(done)
        finally:
            if self._handing_over.get(request_id) is held:
                del self._handing_over[request_id]
            self._work.set()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it while messages are received and steps are made."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compile(self, submit: Submit) -> None:
        """Compile the grammar of a request that waits for it."""
        request_id, wanted = submit.request.request_id, submit.request.params.structured_outputs
        failed: Delta | None
        if self._compiler is None or wanted is None:
            failed = self._core.fail(request_id, "this model has no tokenizer for structured output", invalid=True)
        else:
            try:
                grammar = await self._workers.run(self._compiler.compile, wanted)
                failed = self._core.set_grammar(request_id, grammar)
            except InvalidRequest as error:
                failed = self._core.fail(request_id, error.message, invalid=True)
            except Exception as error:  # a bug in a grammar must not take the instance down
                failed = self._core.fail(request_id, f"the grammar cannot be compiled: {error}")
        if failed is not None:
            await self._send(Deltas(items=[failed]))
        self._work.set()

    async def _send(self, message: Up) -> None:
        """Send, waiting while the gateway does not keep up. Raises LinkClosed."""
        while True:
            try:
                return self._link.send(message)
            except Backpressure:
                await asyncio.sleep(BACKPRESSURE_PAUSE_S)

    def _try_to_send(self, message: Up) -> bool:
        try:
            self._link.send(message)
        except (Backpressure, LinkClosed):
            return False
        return True

    def _cached(self) -> list[CacheChange]:
        """What L1 and L2 hold."""
        held = [change(1, True, self._core.scheduler.kv.hashes)]
        if self._core.tiers is not None:
            held.append(change(2, True, self._core.tiers.hashes))
        return held

    async def _send_last(self, message: Up) -> None:
        try:
            await self._send(message)
        except LinkClosed:
            pass

    async def _report(self, hello: Hello) -> None:
        """Every second: what this instance does and holds. Raises LinkClosed when the gateway's lease is over."""
        while True:
            await self._send_load(progress=True)
            await asyncio.sleep(LOAD_INTERVAL_S)
            self._quiet_s += LOAD_INTERVAL_S
            if not self._heard:
                await self._send(hello)
            elif self._leased and self._quiet_s > self._lease_s:
                raise LinkClosed(f"the gateway has said nothing for {self._lease_s:g} s")

    async def _send_load(self, *, progress: bool) -> None:
        self._reports += 1
        held = self._handing_over | self._core.scheduler.progress() if progress else None
        load = msgspec.structs.replace(
            self._core.load(), sequence=self._reports, progress=held, role=self._role, term=self._term
        )
        if self._feed is not None:
            load = msgspec.structs.replace(load, events_sent=self._feed.sent, events_dropped=self._feed.dropped)
        if self._reporter is not None:
            load = msgspec.structs.replace(load, cache_sequence=self._reporter.sequence)
        await self._send(load)

    # -- steps -----------------------------------------------------------------------------------------------

    async def _step_loop(self) -> None:
        core = self._core
        while True:
            core.fill()
            oldest = core.oldest
            if oldest is None:
                if self._draining and not (core.num_unfinished or self._handing_over or core.leases):
                    await self._send(Drained())
                    return
                await self._send_load(progress=False)
                self._work.clear()
                await self._work.wait()
                continue
            matchers = core.masks()
            if matchers is not None:
                core.bind(await self._workers.run(compute_masks, matchers))
            deltas = core.commit(await asyncio.wrap_future(oldest))
            if deltas:
                await self._send(Deltas(items=deltas))
                for sequence in core.take_prefilled():
                    self._begin_to_hand_over(sequence)
