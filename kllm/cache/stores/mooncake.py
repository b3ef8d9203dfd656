"""MooncakeStore: L3 in the memory of many hosts, through Mooncake Store over TCP.

    mooncake_master      knows which pages there are and where; the only process that users start
    each MooncakeStore   gives memory of its host for pages (a segment), and exchanges them with all the others directly

Pages live in memory: they survive an instance only if they are in somebody else's segment, such as that of Mooncake's
`mooncake_client`, and none survives the master. Once a master is there again, the library mounts the segments again by
itself, within about two seconds; until then calls raise StoreError, and afterwards everything is a miss.

Who reaches the ports of master and stores may read and change all pages: they belong in a trusted network.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kllm.cache.stores.mooncake_client import P2P_HANDSHAKE, PAGES_AT_ONCE, MooncakeClient
from kllm.cache.stores.store import StoreError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
CONNECT_LIMIT_S = 2.0  # for the first answer of the master's port
QUEUE_LIMIT_S = 5.0  # in line behind other calls; more means that those wait for somebody who is gone
TRANSFERS = 4  # threads, each waiting for the library most of the time
LOOKUPS = 2

T = TypeVar("T")


class _Call:
    """wanted: False once the caller does not wait any more."""

    __slots__ = ("begun", "wanted")

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.wanted = True

    def check_queue(self) -> None:
        if (waited := time.monotonic() - self.begun) > QUEUE_LIMIT_S:
            raise StoreError(f"Mooncake is busy: a call was not begun within {waited:.1f} s")


class MooncakeStore:
    """A Store (see store.py) for many hosts. counts.evicted stays 0: evicting is the master's affair, which only the
    master's own metrics show. Made by connect()."""

    def __init__(self, client: MooncakeClient, page_bytes: int) -> None:
        self.counts = client.counts
        self.page_bytes = page_bytes
        self._client = client
        self._lookups = ThreadPoolExecutor(LOOKUPS, "kllm-mooncake-lookup")
        self._transfers = ThreadPoolExecutor(TRANSFERS, "kllm-mooncake-transfer")
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        master: str,
        page_bytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        local_hostname: str | None = None,
        metadata: str = P2P_HANDSHAKE,
    ) -> MooncakeStore:
        """master: HOST:PORT of mooncake_master, the same for all hosts. segment_bytes: memory that this process adds,
        taken as it is used; 0: none. local_hostname: address under which other hosts reach this one; by default that of
        the connection to the master. metadata: as Mooncake's metadata_server.
        Raises StoreError if the library is missing or the master does not answer."""
        host = await _local_address(master)
        store = cls(MooncakeClient(master, page_bytes, segment_bytes, local_hostname or host, metadata), page_bytes)
        try:
            await store._run(store._lookups, store._client.open)
        except BaseException:
            await store.close()
            raise
        return store

    # -- Store ---------------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> int:
        return await self._run(self._lookups, self._exists, _Call(), list(keys))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self._check(keys, into)
        return await self._transfer(self._get, list(keys), list(into))

    async def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        self._check(keys, pages)
        return await self._transfer(self._put, list(keys), list(pages))

    async def clear(self) -> None:
        """Removes the pages of all kLLM instances that use this master, of any model; nothing else."""
        await self._run(self._transfers, self._client.clear)

    async def idle(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.idle()
        await asyncio.get_running_loop().run_in_executor(self._lookups, self._client.close)
        self._lookups.shutdown()
        self._transfers.shutdown()

    # -- calls ---------------------------------------------------------------------------------------------------

    def _begin(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """It runs to its end, whoever stops waiting for it."""
        if self._closed:
            raise StoreError("the Mooncake store is closed")
        future = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.debug("KV store: %s", error)

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.shield(self._begin(pool, function, *arguments))

    async def _transfer(self, function: Callable[..., T], keys: list[bytes], pages: list[memoryview]) -> T:
        call = _Call()
        try:
            return await self._run(self._transfers, function, call, keys, pages)
        except asyncio.CancelledError:
            call.wanted = False
            raise

    def _check(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        for page in pages:
            if page.nbytes != self.page_bytes or not page.c_contiguous:
                raise ValueError(f"a page is {self.page_bytes} bytes in one piece, not {page.nbytes}")

    # -- on the threads ------------------------------------------------------------------------------------------

    def _exists(self, call: _Call, keys: list[bytes]) -> int:
        call.check_queue()
        return self._client.leading(keys)

    def _get(self, call: _Call, keys: list[bytes], into: list[memoryview]) -> list[bool]:
        call.check_queue()
        there: list[bool] = []
        for i in range(0, len(keys), PAGES_AT_ONCE):
            if not call.wanted:
                break
            there += self._client.get(keys[i : i + PAGES_AT_ONCE], into[i : i + PAGES_AT_ONCE])
        return there

    def _put(self, call: _Call, keys: list[bytes], pages: list[memoryview]) -> int:
        call.check_queue()
        written = 0
        for i in range(0, len(keys), PAGES_AT_ONCE):
            if not call.wanted:
                break
            written += self._client.put(keys[i : i + PAGES_AT_ONCE], pages[i : i + PAGES_AT_ONCE])
        return written


async def _local_address(master: str) -> str:
    """Our end of a connection to the master: under this address its other clients reach us, too."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StoreError(f"mooncake_master is given as HOST:PORT, not {master!r}")
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError as error:
        raise StoreError(f"no answer from {master} within {CONNECT_LIMIT_S:g} s; is mooncake_master there?") from error
    except OSError as error:
        raise StoreError(f"cannot connect to mooncake_master at {master}: {error}") from error
    address: str = writer.get_extra_info("sockname")[0]
    writer.close()
    return address
