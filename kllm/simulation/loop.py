"""VirtualTimeLoop: an asyncio loop whose clock jumps to the next timer when nothing is ready.

Hours pass in the time it takes to compute them, and the same program does the same things in the same order: timers
that are due together run in the order in which they were set, and nothing outside the loop can reach it (sockets,
subprocesses, threads and signals are refused).
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TURNS_WITHOUT_TIME = 1_000_000  # callbacks at one instant before it counts as an endless loop
_MIN_CANCELLED = 100  # cancelled timers that are kept before the heap is cleaned of them


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: nothing can ever happen again."""


class Livelock(RuntimeError):
    """Tasks keep waking each other and time does not pass."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and is in seconds. Uses BaseEventLoop's queues of ready callbacks and timers; what it replaces
    is the turn of the loop (no selector, no system clock)."""

    _ready: deque[Handle]
    _scheduled: list[tuple[float, int, TimerHandle]]  # ordered by time, then as set
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._sequence = 0
        self._turns = 0

    def time(self) -> float:
        return self._now

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._scheduled, (when, self._sequence, timer))
        timer._scheduled = True  # type: ignore[attr-defined]  # a cancelled timer then tells the loop so
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Handle:
        return self.call_soon(callback, *args, context=context)  # there is one thread

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if self._timer_cancelled_count > _MIN_CANCELLED and 2 * self._timer_cancelled_count > len(scheduled):
            self._drop_cancelled()
        if not ready and not self._stopping:
            self._advance()
        now = self._now
        while scheduled and scheduled[0][0] <= now:
            timer = heapq.heappop(scheduled)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)
        self._turns += len(ready)
        if self._turns > MAX_TURNS_WITHOUT_TIME:
            raise Livelock(f"{self._turns} callbacks ran at {now:.6f} s and time does not pass")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        """Move the clock to the next timer."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)[2]._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1
        if not scheduled:
            raise Deadlock("every task waits and no timer is set")
        when = scheduled[0][0]
        if when > self._now:
            self._now = when
            self._turns = 0

    def _drop_cancelled(self) -> None:
        kept = [entry for entry in self._scheduled if not entry[2].cancelled()]
        self._scheduled[:] = kept
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = 0

    # -- what would let the world in -------------------------------------------------------------------------

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("virtual time has no sockets, processes, threads or signals")

    add_reader = add_writer = remove_reader = remove_writer = _refuse
    create_connection = create_server = create_datagram_endpoint = _refuse
    create_unix_connection = create_unix_server = connect_accepted_socket = _refuse
    sock_recv = sock_recv_into = sock_sendall = sock_connect = sock_accept = _refuse
    connect_read_pipe = connect_write_pipe = subprocess_exec = subprocess_shell = _refuse
    add_signal_handler = remove_signal_handler = _refuse
    run_in_executor = _refuse
    getaddrinfo = getnameinfo = _refuse


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time. Raises what `main` raises; RuntimeError when tasks are left over at its end or an
    exception reached nobody, because a fleet that leaves such things behind would do so in production too."""
    unhandled: list[dict[str, Any]] = []

    async def checked() -> T:
        result = await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            raise RuntimeError(f"tasks are left running: {sorted(task.get_name() for task in left)}")
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        result = runner.run(checked())
    if unhandled:
        raise RuntimeError(f"an exception reached nobody: {unhandled[0]}")
    return result
