"""Reads: copies that block, on threads of their own, each with a deadline for whoever waits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

from kllm.cache.transfer.port import TransferError

AT_ONCE = 4  # reads; one of pages in this host's memory is faster than a core computes


class Read:
    """One copy, as its thread sees it. Bytes are written only where `wanted` is true under `lock`: whoever gives up
    takes the lock, and knows then that nothing is written any more."""

    __slots__ = ("lock", "wanted")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = True

    def give_up(self) -> None:
        with self.lock:
            self.wanted = False


class Reads:
    """A read that has not ended when its time is over is left to itself: its thread may hang in a library for as long
    as that likes, and holds neither the caller nor the end of the process. Until it has ended, its peer is not asked
    again."""

    def __init__(self) -> None:
        self._overdue: Counter[str] = Counter()  # by address
        self._places = asyncio.Semaphore(AT_ONCE)

    async def run(self, address: str, copy: Callable[[Read], None], timeout_s: float) -> None:
        """Raises TransferError when the copy does, and when it has not ended within timeout_s seconds; when it has
        raised or was cancelled, nothing is written any more."""
        if timeout_s <= 0.0:
            raise TransferError("there is no time left for it")
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        try:
            await asyncio.wait_for(self._places.acquire(), timeout_s)
        except TimeoutError:
            raise TransferError("other reads take too long") from None
        try:
            await self._run(address, copy, until - loop.time())
        finally:
            self._places.release()

    async def _run(self, address: str, copy: Callable[[Read], None], timeout_s: float) -> None:
        if self._overdue[address]:
            raise TransferError(f"an earlier read from {address} has not ended yet")
        loop = asyncio.get_running_loop()
        read = Read()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        threading.Thread(target=_work, args=(copy, read, loop, ended), name="kv-transfer", daemon=True).start()
        try:
            await asyncio.wait([ended], timeout=timeout_s)
        finally:
            if not ended.done():
                self._leave(address, read, ended)
        if not ended.done():
            raise TransferError(f"{address} has not sent all within {timeout_s:.2g} s")
        if (error := ended.result()) is not None:
            raise error

    def _leave(self, address: str, read: Read, ended: asyncio.Future[BaseException | None]) -> None:
        read.give_up()
        self._overdue[address] += 1

        def over(_: object) -> None:
            self._overdue[address] -= 1
            if not self._overdue[address]:
                del self._overdue[address]

        ended.add_done_callback(over)


def _work(
    copy: Callable[[Read], None],
    read: Read,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[BaseException | None],
) -> None:
    """The thread of one read."""
    error: BaseException | None = None
    try:
        copy(read)
    except BaseException as raised:
        error = raised
    try:
        loop.call_soon_threadsafe(ended.set_result, error)
    except RuntimeError:  # the loop is closed: nobody waits
        pass
