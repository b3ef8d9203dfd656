"""The gateway's hold on one incarnation of an instance: its link, its life, and the requests it works on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable

from kllm.cluster.backlog import Backlog
from kllm.cluster.cache_directory import CacheReport
from kllm.cluster.launchers.launcher import Instance
from kllm.cluster.progress_watch import Progress, ProgressWatch
from kllm.cluster.request_stream import RequestStream
from kllm.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheCleared,
    CacheDelta,
    CacheDump,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Failed,
    Hello,
    Leaving,
    Ping,
    PrefillDone,
    Release,
    Role,
    SetGrade,
    SetRole,
    Starting,
    Submit,
    Up,
    WatchCache,
)
from kllm.request import Delta
from kllm.transport.link import Backpressure, LinkClosed

logger = logging.getLogger(__name__)

RETRY_SEND_S = 0.02  # between attempts to send to an instance that does not keep up
PING_INTERVAL_S = 1.0
ASK_AGAIN_S = 1.0  # a question or its answer may be lost
QUIET_S = 5.0  # several reports long
LAST_WORDS_S = 1.0  # from the exit of a process to the end of its link, or the other way round


class InstanceFailed(RuntimeError):
    """An instance could not start; the message says why in its own words."""


class InstanceHandle:
    """starting -> ready -> over. `assigned` are the requests submitted and not ended, oldest first.

    An incarnation is over when its process exits, its link closes, it reports Failed, or it has work and for
    silence_limit seconds makes no step or says nothing (it sends EngineLoad every second, however long a step takes).
    Messages wait in an outbox while the link refuses them. What a link loses all the same is noticed in the
    reports: on_astray is called for a request whose messages were lost. The callbacks must not block.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        on_starting: Callable[[Starting], None],
        on_delta: Callable[[Delta], None],
        on_astray: Callable[[RequestStream, str], None],
        on_cache: Callable[[CacheReport], None],
        on_prefilled: Callable[[PrefillDone], None],
        silence_limit: float,
    ) -> None:
        self.hello: Hello | None = None
        self.load = EngineLoad()
        self.leaving = False  # it was told to end by somebody else, and finishes what it has
        self.assigned: dict[str, RequestStream] = {}
        self._instance = instance
        self._on_starting = on_starting
        self._on_delta = on_delta
        self._on_astray = on_astray
        self._on_cache = on_cache
        self._on_prefilled = on_prefilled
        self._role: Role = "both"
        self._term = 0
        self._grade = 0
        self._wanted_role: SetRole | None = None
        self._awaited: list[asyncio.Future[None]] = []  # by those in `until`
        self.backlog = Backlog()
        self._dump_missing = False  # it was asked for, and has not come
        self._silence_limit = silence_limit
        self._phase = "process start"
        self._outbox: deque[Down] = deque()
        self._watch = ProgressWatch()
        self._tokens = itertools.count()
        self._clearings: dict[str, asyncio.Future[CacheCleared]] = {}  # by the token of the question
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._last_message = loop.time()
        self._heard = loop.time()  # or when it had no work last
        self._stepped = loop.time()  # when a report last showed a step, or nothing to step for
        self._retry: asyncio.TimerHandle | None = None
        self._next_ping: asyncio.TimerHandle | None = None
        self._hello_or_over: asyncio.Future[None] = loop.create_future()
        self._link_closed: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()
        self._silence = loop.call_later(silence_limit, self._check_silence)
        self._tasks = (asyncio.create_task(self._receive()), asyncio.create_task(self._watch_exit()))

    # --- life ---

    @property
    def ready(self) -> bool:
        return self.hello is not None and not self.leaving and not self._over.done()

    @property
    def silent_s(self) -> float:
        """Seconds since its last message."""
        return self._loop.time() - self._last_message

    @property
    def quiet(self) -> bool:
        """Its reports fail to come: it hangs, or cannot be reached. Until that is certain others are better."""
        return self._loop.time() - self._last_message > QUIET_S

    async def started(self, timeout: float) -> Hello:
        """Waits for Hello. Raises InstanceFailed."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello_or_over), timeout)
        except TimeoutError:
            raise InstanceFailed(f"the instance was not ready after {timeout:g} s; it was at: {self._phase}") from None
        if self.hello is None:
            raise InstanceFailed(self._over.result())
        return self.hello

    async def over(self) -> str:
        """Waits for the end of this incarnation; returns the reason."""
        return await asyncio.shield(self._over)

    async def ended(self, timeout: float) -> None:
        """Waits for the end of this incarnation, at most `timeout` seconds."""
        await asyncio.wait((self._over,), timeout=timeout)

    async def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits for something that its reports or the ends of its requests bring about; False if it does not come."""
        due = self._loop.time() + timeout
        while not condition():
            if self._over.done() or self._loop.time() >= due:
                return False
            change = self._loop.create_future()
            self._awaited.append(change)
            await asyncio.wait([change], timeout=due - self._loop.time())
        return True

    def _changed(self) -> None:
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for change in awaited:
                change.set_result(None)

    async def stop(self, grace_s: float) -> None:
        """End it, if it is not over, and free what it holds."""
        self._end("stopped by the gateway")
        for task in self._tasks:
            task.cancel()
        await self._instance.stop(grace_s)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, reason: str) -> None:
        if self._over.done():
            return
        self._over.set_result(reason)
        self._changed()
        if not self._hello_or_over.done():
            self._hello_or_over.set_result(None)
        self._outbox.clear()
        self._silence.cancel()
        for timer in (self._retry, self._next_ping):
            if timer is not None:
                timer.cancel()

    async def _watch_exit(self) -> None:
        reason = await self._instance.wait()
        await asyncio.wait((self._link_closed, self._over), timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        self._end(reason)

    def _check_silence(self) -> None:
        due = self._heard + self._silence_limit
        now = self._loop.time()
        if self.assigned and now >= due:
            self._end(f"the instance said nothing for {self._silence_limit:g} s while it had work")
            return
        wait = due - now if due > now else self._silence_limit
        self._silence = self._loop.call_later(wait, self._check_silence)

    # --- up ---

    async def _receive(self) -> None:
        link = self._instance.link
        try:
            while not self._over.done():
                self._handle(await link.recv())
        except LinkClosed as error:
            self._link_closed.set_result(None)
            await asyncio.wait((self._over,), timeout=LAST_WORDS_S)  # the exit of the process says more
            self._end(f"the link to the instance closed: {error}")
        except Exception as error:
            logger.exception("a message from the instance could not be handled")
            self._end(f"a message from the instance could not be handled: {error!r}")

    def _handle(self, message: Up) -> None:
        self._heard = self._last_message = self._loop.time()
        match message:
            case Deltas():
                on_delta = self._on_delta
                for delta in message.items:
                    on_delta(delta)
            case EngineLoad():
                self._on_load(message)
            case PrefillDone():
                self._on_prefilled(message)
            case Starting():
                self._phase = f"{message.phase} ({message.fraction:.0%})"
                self._on_starting(message)
            case Hello():
                self._on_hello(message)
            case CacheDelta() | CacheDump():
                self._dump_missing &= isinstance(message, CacheDelta)
                self._on_cache(message)
            case CacheCleared():
                asked = self._clearings.get(message.token)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case Leaving():
                logger.info("the instance is leaving, with %d requests of ours", len(self.assigned))
                self.leaving = True
            case Drained():
                logger.debug("the instance has drained")
            case Failed():
                self._end(message.error)

    def _on_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._end(f"the instance speaks version {hello.version} of the protocol, this gateway {PROTOCOL_VERSION}")
        elif self.hello is None and not self._over.done():
            self.hello = hello
            self._role, self._term = hello.role, hello.term
            self._hello_or_over.set_result(None)
            self._ping()

    def _on_load(self, load: EngineLoad) -> None:
        if 0 < load.sequence <= self.load.sequence:
            return  # overtaken by a later one, or repeated
        now = self._loop.time()
        if load.running + load.waiting == 0 or load.steps != self.load.steps or not self.assigned:
            self._stepped = now
        self.load = load
        if load.term > self._term:
            self._role, self._term = load.role, load.term
        self._changed()
        self.backlog.report(load)
        if load.cache_sequence:
            self._on_cache(load)
        if now - self._stepped >= self._silence_limit:
            self._end(f"the instance made no step for {self._silence_limit:g} s while it had work")
        elif load.progress is not None and not self._outbox:  # what waits in the outbox cannot be there yet
            self._compare(load.progress)

    def _compare(self, progress: Progress) -> None:
        """Repair what lost messages have left: work in vain, and requests that wait in vain."""
        for request_id, attempt in self._watch.strays(progress, self.assigned):
            self._send(Abort(request_ids=[request_id], attempt=attempt))
        for stream, why in self._watch.astray(progress, self.assigned):
            self._on_astray(stream, why)

    # --- down ---

    def has_output(self, request_id: str) -> None:
        self.backlog.has_output(request_id)

    def forget(self, request_id: str) -> None:
        """A request that was here has ended."""
        self.assigned.pop(request_id, None)
        self.backlog.forget(request_id)
        self._changed()

    def watch_cache(self) -> None:
        """Ask what it caches; again every second until it says so."""
        self._dump_missing = True
        self._send(WatchCache())

    @property
    def role(self) -> Role:
        """What it is used for, by its latest word."""
        return self._role

    @property
    def term(self) -> int:
        """Of its role."""
        return self._term

    def set_role(self, role: Role, term: int) -> None:
        """It says in its reports when it has it; asked again until then."""
        self._wanted_role = SetRole(role=role, term=term)
        self._send(self._wanted_role)

    def set_grade(self, grade: int) -> None:
        """Of degradation. It says in its reports when it has it; asked again until then."""
        self._grade = grade
        self._send(SetGrade(grade=grade))

    def release(self, lease: str) -> None:
        """KV that it holds for others is not needed any more."""
        self._send(Release(leases=[lease]))

    def submit(self, stream: RequestStream, lacking: int, pulling: int, prefill_only: bool) -> None:
        """lacking: tokens that it has to compute first, as far as is known. pulling: those whose KV it takes."""
        tokens = len(stream.request.prompt_token_ids) + len(stream.outputs)
        self.backlog.add(stream.request.request_id, stream.attempt, tokens, lacking, pulling)
        if not self.assigned:
            self._heard = self._stepped = self._loop.time()  # an idle instance owes no sign of life
        request = stream.request_to_submit
        self.assigned[request.request_id] = stream
        kv = stream.kv.source if stream.kv is not None else None
        self._send(
            Submit(
                request=request,
                outputs=list(stream.outputs),
                attempt=stream.attempt,
                prefill_only=prefill_only,
                kv=kv,
            )
        )

    def abort(self, stream: RequestStream) -> None:
        """Stop the current attempt of a request that is here."""
        request_id = stream.request.request_id
        del self.assigned[request_id]
        self.backlog.forget(request_id)
        self._changed()
        self._send(Abort(request_ids=[request_id], attempt=stream.attempt))

    def drain(self) -> None:
        self._send(Drain())

    async def clear_cache(self, store: bool, timeout: float) -> CacheCleared | None:
        """The instance's answer; None if it, or only the connection to it, ended instead. Raises TimeoutError."""
        token = str(next(self._tokens))
        answer = self._clearings[token] = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout):
                while not answer.done() and not self._over.done():
                    self._send(ClearCache(token=token, store=store))
                    await asyncio.wait((answer, self._over), timeout=ASK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._clearings[token]
        return answer.result() if answer.done() else None

    def _ping(self) -> None:
        if not self._outbox:
            self._send(WatchCache() if self._dump_missing else Ping())
            if self._wanted_role is not None and self._term < self._wanted_role.term:
                self._send(self._wanted_role)
            if self.load.grade != self._grade:
                self._send(SetGrade(grade=self._grade))
        if not self._over.done():
            self._next_ping = self._loop.call_later(PING_INTERVAL_S, self._ping)

    def _send(self, message: Down) -> None:
        if not self._over.done():
            self._outbox.append(message)
            if self._retry is None:
                self._flush()

    def _flush(self) -> None:
        self._retry = None
        try:
            while self._outbox:
                self._instance.link.send(self._outbox[0])
                self._outbox.popleft()
        except Backpressure:
            self._retry = self._loop.call_later(RETRY_SEND_S, self._flush)
        except LinkClosed:
            self._outbox.clear()  # the receiving task ends this incarnation, and its requests are resubmitted
        except ValueError as error:
            self._refuse(self._outbox.popleft(), str(error))
            self._flush()

    def _refuse(self, message: Down, error: str) -> None:
        """A message that no link can carry."""
        logger.error("cannot send %s to the instance: %s", type(message).__name__, error)
        if isinstance(message, Submit):
            self._loop.call_soon(  # not at once: whoever submits is in the middle of it
                self._on_delta,
                Delta(
                    request_id=message.request.request_id,
                    attempt=message.attempt,
                    index=len(message.outputs),
                    finish_reason="error",
                    error=error,
                ),
            )
