"""SharedMemoryTransfer: slots in memory that other processes of the same user on this host can read.

The slots are a memfd, which has no name in any folder: it is there for as long as its process is, whatever ends that,
and nothing has to be cleaned up. Others open it as /proc/PID/fd/N, which Linux allows to processes of the same user (or
root). The address has a random name, which the memfd bears too: a process that has got the same PID, or another
container's, is not mistaken for its owner.

    shm:PID:FD:NAME
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kllm.cache.transfer.port import TransferError
from kllm.cache.transfer.reads import Read, Reads

MOST_PAGES = 512  # of one system call, which takes 1,024 buffers at most
PIECE_BYTES = 4 << 20  # of one system call: about a millisecond, for which whoever gives up waits
PREFIX = "kllm-kv-"
ADDRESS = re.compile(r"shm:(\d{1,10}):(\d{1,10}):([0-9a-f]{32})")


class SharedMemoryTransfer:
    """The KvTransfer port. slots: uint8 [num_slots, page_bytes], zeros that take memory once they are written.

    Raises OSError where there are no memfds, ValueError where others could not open them."""

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfds")
        name = secrets.token_hex(16)
        self._page_bytes = page_bytes
        self._fd = os.memfd_create(PREFIX + name, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        self.address = f"shm:{os.getpid()}:{self._fd}:{name}"
        os.ftruncate(self._fd, num_slots * page_bytes)
        memory = mmap.mmap(self._fd, num_slots * page_bytes)
        self.slots = np.frombuffer(memory, np.uint8).reshape(num_slots, page_bytes)
        self._reads = Reads()
        try:
            os.close(_open(self.address))
        except TransferError as error:
            raise ValueError(f"kv_transfer shm needs a /proc where processes see each other: {error}") from error

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        await self._reads.run(address, partial(self._copy, address, list(theirs), list(mine)), timeout_s)

    def _copy(self, address: str, theirs: list[int], mine: list[int], read: Read) -> None:
        fd = _open(address)
        try:
            for first, last in self._runs(theirs):
                pages = [memoryview(self.slots[slot]) for slot in mine[first:last]]
                with read.lock:
                    if not read.wanted:
                        return
                    count = os.preadv(fd, pages, theirs[first] * self._page_bytes)
                if count != self._page_bytes * len(pages):
                    raise TransferError("the peer has no such pages")
        except OSError as error:
            raise TransferError(f"cannot read from {address}: {error}") from error
        finally:
            os.close(fd)

    def _runs(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """(first, last) of consecutive slots, which one system call reads."""
        most = min(MOST_PAGES, max(1, PIECE_BYTES // self._page_bytes))
        breaks = [i for i, (one, following) in enumerate(pairwise(slots), 1) if following != one + 1]
        for first, last in pairwise([0, *breaks, len(slots)]):
            for start in range(first, last, most):
                yield start, min(last, start + most)

    async def close(self) -> None:
        """The memory itself goes when nothing refers to `slots` any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
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
