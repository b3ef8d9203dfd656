"""SharedMemoryTransfer: slots in memory that other processes of the same user on this host can read.

The slots are a memfd, which has no name in any folder: it is there for as long as its process is, whatever ends that,
and nothing has to be cleaned up. Others open it as /proc/PID/fd/N, which Linux allows to processes of the same user (or
root). The address has a random name, which the memfd bears too: a process that has got the same PID, or another
container's, is not mistaken for its owner.

    shm:PID:FD:NAME
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from kllm.cache.transfer.port import TransferError

READERS = 2  # threads; one copies faster than a core computes
MOST_PAGES = 512  # of one system call, which takes 1,024 buffers at most
PREFIX = "kllm-kv-"
ADDRESS = re.compile(r"shm:(\d{1,10}):(\d{1,10}):([0-9a-f]{32})")


class SharedMemoryTransfer:
    """The KvTransfer port. slots: uint8 [num_slots, page_bytes], zeros that take memory once they are written.

    Raises OSError where there are no memfds, ValueError where others could not open them."""

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        name = secrets.token_hex(16)
        self._page_bytes = page_bytes
        self._fd = os.memfd_create(PREFIX + name, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        self.address = f"shm:{os.getpid()}:{self._fd}:{name}"
        os.ftruncate(self._fd, num_slots * page_bytes)
        memory = mmap.mmap(self._fd, num_slots * page_bytes)
        self.slots = np.frombuffer(memory, np.uint8).reshape(num_slots, page_bytes)
        self._threads = ThreadPoolExecutor(READERS, "kv-transfer")
        self._running: set[asyncio.Future[None]] = set()
        try:
            os.close(_open(self.address))
        except TransferError as error:
            raise ValueError(f"kv_transfer shm needs a /proc where processes see each other: {error}") from error

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(self._threads, self._copy, address, list(theirs), list(mine), until)
        self._running.add(copy)
        copy.add_done_callback(self._ended)
        done, _ = await asyncio.wait([copy], timeout=timeout_s)
        if not done:
            raise TransferError(f"not read within {timeout_s:.2g} s")
        copy.result()

    def _ended(self, copy: asyncio.Future[None]) -> None:
        self._running.discard(copy)
        if not copy.cancelled():
            copy.exception()  # nobody waits for one that was late

    def _copy(self, address: str, theirs: list[int], mine: list[int], until: float) -> None:
        fd = _open(address)
        try:
            for first, last in _runs(theirs):
                if time.monotonic() > until:
                    raise TransferError("the transfer's time is over")
                pages = [memoryview(self.slots[slot]) for slot in mine[first:last]]
                read = os.preadv(fd, pages, theirs[first] * self._page_bytes)
                if read != self._page_bytes * len(pages):
                    raise TransferError("the peer has no such pages")
        except OSError as error:
            raise TransferError(f"cannot read from {address}: {error}") from error
        finally:
            os.close(fd)

    async def idle(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """The memory itself goes when nothing refers to `slots` any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            await self.idle()
            self._threads.shutdown()
            os.close(fd)


def _open(address: str) -> int:
    """A file descriptor of a peer's slots. Raises TransferError if they are not there (any more)."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise TransferError(f"not an address of shared memory: {address!r}")
    pid, number, name = match.groups()
    path = f"/proc/{pid}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{PREFIX}{name}"):  # something else may not even be opened
            raise TransferError(f"{address} is another process by now")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"the process of {address} is gone or another user's: {error}") from error
    try:
        _check(fd, name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, name: str) -> None:
    """What was opened may be another file than the one that was looked at. Raises TransferError."""
    found = os.fstat(fd)
    right = stat.S_ISREG(found.st_mode) and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{PREFIX}{name}")
    if not right or found.st_uid != os.geteuid():
        raise TransferError("the peer's memory belongs to another user, or is something else by now")


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of consecutive slots, which one call reads."""
    breaks = [i for i, (one, following) in enumerate(pairwise(slots), 1) if following != one + 1]
    for first, last in pairwise([0, *breaks, len(slots)]):
        for start in range(first, last, MOST_PAGES):
            yield start, min(last, start + MOST_PAGES)
