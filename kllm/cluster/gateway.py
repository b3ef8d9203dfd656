"""The gateway: takes requests, gives them to an instance, and keeps them whole when the instance dies.

A request accepted by `generate` ends in exactly one way: completed, error, or abort. The gateway's table holds every
request that has not ended; each is in exactly one place:

    waiting  -- no instance is ready, or suspects are being tried
    assigned -- submitted to the instance (InstanceHandle.assigned)
    suspects -- in flight at several deaths in a row: tried one at a time, so that only the killer is blamed

Only asyncio's primitives and the loop's clock are used here: the same class runs in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from kllm.cluster.admission import CompletionRate, QueueFull, Unavailable, admit
from kllm.cluster.instance_handle import InstanceFailed, InstanceHandle
from kllm.cluster.launchers.launcher import InstanceLauncher, LaunchError
from kllm.cluster.request_stream import End, Gap, RequestStream
from kllm.messages import EngineLoad, Hello, Starting
from kllm.request import Delta, InvalidRequest, Request

__all__ = ["Gateway", "InstanceFailed", "QueueFull", "RequestStream", "Unavailable"]

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
RETRY_OUTAGE_S = 5  # Retry-After while the instance starts


class Gateway:
    """One instance behind a bounded queue.

    max_queue: requests in flight at once. start_timeout: seconds from launch to Hello.
    max_restarts: failures in a row (starts that fail, idle instances that die) before it gives up for good.
    max_attempts: instances that a request may see die, without making progress, before it ends with an error.
    silence_limit: seconds without a message from an instance that has work before it counts as hung.
    max_outage: seconds without a ready instance during which new requests are still taken.
    stop_grace: seconds that an instance gets to exit before it is killed.
    rng: draws seeds and jitter. on_starting: progress of every start.
    """

    def __init__(
        self,
        launcher: InstanceLauncher,
        *,
        rng: random.Random,
        max_queue: int = 1024,
        start_timeout: float = 600.0,
        max_restarts: int = 5,
        max_attempts: int = 3,
        silence_limit: float = 60.0,
        max_outage: float = 30.0,
        stop_grace: float = 5.0,
        on_starting: Callable[[Starting], None] = lambda _: None,
    ) -> None:
        self.info: Hello | None = None  # of the latest instance that became ready
        self.restarts = 0
        self.accepted = 0
        self.ended = dict.fromkeys(End, 0)
        self._launcher = launcher
        self._rng = rng
        self._max_queue = max_queue
        self._start_timeout = start_timeout
        self._max_restarts = max_restarts
        self._max_attempts = max_attempts
        self._silence_limit = silence_limit
        self._max_outage = max_outage
        self._stop_grace = stop_grace
        self._on_starting = on_starting
        self._table: dict[str, RequestStream] = {}
        self._waiting: dict[str, RequestStream] = {}
        self._suspects: dict[str, RequestStream] = {}
        self._probe: RequestStream | None = None  # the suspect being tried
        self._idle = asyncio.Event()
        self._idle.set()
        self._handle: InstanceHandle | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failures = 0
        self._down_since = 0.0  # when the last incarnation ended, while _handle is None
        self._draining = False
        self._gave_up: str | None = None
        self._past = EngineLoad()  # counters of past incarnations
        self._rate = CompletionRate()

    # --- what can be seen ---

    @property
    def ready(self) -> bool:
        """An instance is ready and requests are taken."""
        return self._handle is not None and self._handle.ready and not self._draining

    @property
    def healthy(self) -> bool:
        """False once it has given up restarting: only a new gateway helps."""
        return self._gave_up is None

    @property
    def in_flight(self) -> int:
        return len(self._table)

    @property
    def load(self) -> EngineLoad:
        """The instance's latest report; zeros while there is none."""
        return EngineLoad() if self._handle is None else self._handle.load

    @property
    def totals(self) -> EngineLoad:
        """The counters of EngineLoad, over all incarnations."""
        return _add_counters(self._past, self.load)

    def check(self) -> None:
        """Every accepted request is in one place or has ended once."""
        assigned = {} if self._handle is None else self._handle.assigned
        places = [*self._waiting.items(), *self._suspects.items(), *assigned.items()]
        assert dict(places) == self._table, "a request is lost, or held after its end"
        assert len(places) == len(self._table), "a request is in two places"
        assert all(stream.end is None for stream in self._table.values()), "a request in the table has ended"
        assert self.accepted == len(self._table) + sum(self.ended.values()), "a request ended twice or never"
        assert self._idle.is_set() == (not self._table)
        assert self._probe is None or self._probe.request.request_id in assigned, "the suspect on trial is not running"

    # --- requests ---

    def generate(self, request: Request) -> RequestStream:
        """Accept a request. Read the stream to its end or `aclose()` it, which aborts the request at once.

        Raises InvalidRequest, QueueFull or Unavailable here, before anything is streamed."""
        info = self._info_if_available()
        if len(self._table) >= self._max_queue:
            now = asyncio.get_running_loop().time()
            raise QueueFull(self._max_queue, self._rate.seconds_for(self._max_queue / 10, now))
        if request.request_id in self._table:
            raise InvalidRequest(f"a request with the id {request.request_id!r} is already running", "request_id")
        stream = RequestStream(admit(request, info, self._rng.getrandbits(63)), self._on_client_gone)
        self.accepted += 1
        self._table[request.request_id] = self._waiting[request.request_id] = stream
        self._idle.clear()
        self._submit_waiting()
        return stream

    def _info_if_available(self) -> Hello:
        if self._gave_up is not None:
            raise Unavailable(f"the model's instance keeps failing: {self._gave_up}")
        if self._draining:
            raise Unavailable("the server is shutting down", RETRY_OUTAGE_S)
        if self.info is None:
            raise Unavailable("the model is still loading", RETRY_OUTAGE_S)
        if self._handle is None and asyncio.get_running_loop().time() - self._down_since > self._max_outage:
            raise Unavailable("the model is being restarted", RETRY_OUTAGE_S)
        return self.info

    def _submit_waiting(self) -> None:
        handle = self._handle
        if handle is None or not handle.ready:
            return
        on_trial = bool(self._suspects) or self._probe is not None
        for request_id, stream in list(self._waiting.items()):
            trusted = stream.attempt > 0 and stream.strikes == 0
            if (trusted or not on_trial) and self._waiting.pop(request_id, None) is not None:
                handle.submit(stream)
        if self._probe is None and self._suspects:
            request_id = next(iter(self._suspects))
            self._probe = self._suspects.pop(request_id)
            handle.submit(self._probe)

    def _on_delta(self, delta: Delta) -> None:
        stream = self._table.get(delta.request_id)
        if stream is None:
            return  # aborted meanwhile
        try:
            if not stream.accept(delta):
                return
        except Gap as gap:
            logger.error("%s; submitting the request again", gap)
            self._on_gap(stream)
            return
        if stream.end is not None:
            self._failures = 0
            self._remove(stream)
        elif stream.proven:
            self._failures = 0
            if self._probe is stream:
                self._probe = None
                self._submit_waiting()

    def _on_gap(self, stream: RequestStream) -> None:
        assert self._handle is not None
        self._handle.abort(stream.request.request_id)
        self._try_again(stream, "tokens were lost on the way from the instance")
        self._submit_waiting()

    def _try_again(self, stream: RequestStream, why: str) -> None:
        """A request whose attempt is lost: back into the queue, or the end if it has been tried too often."""
        self._probe = None if self._probe is stream else self._probe
        stream.next_attempt()
        if stream.strikes >= self._max_attempts:
            stream.fail(f"the request failed after {stream.strikes} attempts in a row: {why}")
            self._remove(stream)
        elif stream.strikes > 0 and stream.strikes == self._max_attempts - 1:
            self._suspects[stream.request.request_id] = stream
        else:
            self._waiting[stream.request.request_id] = stream

    def _on_client_gone(self, stream: RequestStream) -> None:
        if self._handle is not None:
            self._handle.abort(stream.request.request_id)
        self._remove(stream)

    def _remove(self, stream: RequestStream) -> None:
        """Forget a request that has just ended."""
        assert stream.end is not None
        request_id = stream.request.request_id
        del self._table[request_id]
        self._waiting.pop(request_id, None)
        self._suspects.pop(request_id, None)
        if self._handle is not None:
            self._handle.assigned.pop(request_id, None)
        self.ended[stream.end] += 1
        self._rate.record(asyncio.get_running_loop().time())
        if not self._table:
            self._idle.set()
        self._probe = None if self._probe is stream else self._probe
        if self._waiting or self._suspects:
            self._submit_waiting()

    # --- the instance's life ---

    async def start(self) -> Hello:
        """Launch the instance and wait until it is ready. Raises InstanceFailed with the instance's own message."""
        handle = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(handle))
        assert self.info is not None
        return self.info

    async def _launch(self) -> InstanceHandle:
        try:
            instance = await self._launcher.launch()
        except LaunchError as error:
            raise InstanceFailed(str(error)) from error
        handle = InstanceHandle(
            instance, on_starting=self._on_starting, on_delta=self._on_delta, silence_limit=self._silence_limit
        )
        try:
            self.info = await handle.started(self._start_timeout)
        except BaseException:
            await handle.stop(self._stop_grace)
            raise
        self._handle = handle
        self._submit_waiting()
        return handle

    async def _supervise(self, handle: InstanceHandle) -> None:
        try:
            while True:
                reason = await handle.over()
                if self._draining and not self._table:
                    return
                logger.error("the instance ended with %d requests in flight: %s", len(handle.assigned), reason)
                self._recover(handle, reason)
                await handle.stop(self._stop_grace)
                restarted = await self._restart(reason)
                if restarted is None:
                    return
                handle = restarted
        except Exception as error:
            logger.exception("the gateway's supervision failed")
            self._give_up(f"internal error: {error!r}")

    def _recover(self, handle: InstanceHandle, reason: str) -> None:
        """Take back what a dead instance was working on."""
        self._handle = None
        self._down_since = asyncio.get_running_loop().time()
        self._past = _add_counters(self._past, handle.load)
        if not handle.assigned:
            self._failures += 1  # otherwise its requests are to blame first: they cannot kill more than a few
        waiting, self._waiting = self._waiting, {}  # the older requests go first
        for stream in handle.assigned.values():
            self._try_again(stream, reason)
        self._waiting.update(waiting)

    async def _restart(self, reason: str) -> InstanceHandle | None:
        while self._failures <= self._max_restarts:
            await asyncio.sleep(self._backoff())
            self.restarts += 1
            try:
                return await self._launch()
            except InstanceFailed as error:
                logger.error("the instance could not be restarted: %s", error)
                self._failures += 1
                reason = str(error)
        self._give_up(reason)
        return None

    def _backoff(self) -> float:
        """Seconds before the next start: none after a death during work, then doubling, with jitter."""
        if self._failures == 0:
            return 0.0
        longest = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (self._failures - 1))
        return longest * self._rng.uniform(0.5, 1.0)

    def _give_up(self, reason: str) -> None:
        logger.critical("giving up on the instance: %s", reason)
        self._gave_up = reason
        for stream in list(self._table.values()):
            stream.fail(f"the model's instance keeps failing: {reason}")
            self._remove(stream)

    # --- the end ---

    async def drain(self, timeout: float) -> None:
        """Take no new requests, give those in flight `timeout` seconds, abort the rest, and stop the instance."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.warning("aborting %d requests that did not finish in %g s", len(self._table), timeout)
            self._abort_all()
        if self._handle is not None:
            self._handle.drain()
            await asyncio.wait((asyncio.ensure_future(self._handle.over()),), timeout=self._stop_grace)
        await self.close()

    async def close(self) -> None:
        """Abort what is in flight and stop the instance. Idempotent."""
        self._draining = True
        self._abort_all()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._handle is not None:
            self._past = self.totals
            handle, self._handle = self._handle, None
            await handle.stop(self._stop_grace)

    def _abort_all(self) -> None:
        for stream in list(self._table.values()):
            if self._handle is not None:
                self._handle.abort(stream.request.request_id)
            stream.abort()
            self._remove(stream)


def _add_counters(a: EngineLoad, b: EngineLoad) -> EngineLoad:
    return EngineLoad(
        preemptions=a.preemptions + b.preemptions,
        prefix_queries=a.prefix_queries + b.prefix_queries,
        prefix_hits=a.prefix_hits + b.prefix_hits,
        steps=a.steps + b.steps,
        step_s=a.step_s + b.step_s,
    )
