"""DiskStore: L3 on a local disk, in one folder that all instances of the host share.

    folder.py       layout and version of the folder          segment.py      files with pages, checksums
    index.py        which page is where (LMDB)                segment_log.py  appending, eviction, cleaning up

Pages are appended to segment files and indexed when they are on the disk, so whatever was killed or lost its power in
the middle leaves at most bytes that nothing refers to. A page is returned only if its header and checksum are right.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kllm.cache.stores.folder import open_folder
from kllm.cache.stores.index import Uses, map_bytes
from kllm.cache.stores.segment import HEADER_BYTES, MAX_KEY_BYTES, Location, Outcome, Wanted, read_pages
from kllm.cache.stores.segment_log import BATCH_BYTES, SEGMENTS_AT_LEAST, SegmentLog, clean
from kllm.cache.stores.store import StoreCounts, StoreError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
READERS = 4  # threads
_MOST_PAGES_READ = 64  # by one piece of work of a reader
_USES_WRITTEN = 256  # reused pages that are written down with one put
_MOST_USES = 4096  # reused pages remembered until then
T = TypeVar("T")


class _Call:
    """wanted: False once the caller does not wait any more."""

    __slots__ = ("wanted",)

    def __init__(self) -> None:
        self.wanted = True


class _UseBook:
    """Which segments and pages were read lately. Reading costs no transaction: puts write this down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, float] = {}
        self._keys: dict[bytes, None] = {}

    def note(self, pages: Sequence[tuple[bytes, Location]], now: float) -> None:
        with self._lock:
            for key, location in pages:
                self._segments[location.segment] = now
                if len(self._keys) < _MOST_USES:
                    self._keys[key] = None

    def take(self, most: int) -> Uses:
        with self._lock:
            keys = list(self._keys)[:most]
            for key in keys:
                del self._keys[key]
            segments, self._segments = self._segments, {}
        return Uses(segments, keys)


class DiskStore:
    """A Store (see store.py). Pages of all models may share the folder: keys differ. Stores of one folder with
    different capacities each keep to their own. Where the folder cannot be written, it is opened for reading: put() and
    clear() raise StoreError, the rest works.

    page_bytes: of the pages that this store gets and puts. capacity_bytes: of all segment files; the index comes on top
    (under 0.2 % for pages of 256 KiB and more). clock: seconds since 1970.
    Raises StoreError if the folder is not a store, or cannot be made or read.
    """

    def __init__(
        self,
        folder: str | Path,
        page_bytes: int,
        capacity_bytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        record = HEADER_BYTES + page_bytes
        if capacity_bytes < 2 * record:
            raise StoreError(
                f"{folder}: a capacity of {capacity_bytes:,} bytes is too small for pages of {page_bytes:,}"
            )
        self.counts = StoreCounts()
        self.page_bytes = page_bytes
        self._clock = clock
        self._counting = threading.Lock()
        self._uses = _UseBook()
        self._folder = open_folder(Path(folder), map_bytes(capacity_bytes, page_bytes), create=True)
        segment_bytes = max(record, min(segment_bytes, capacity_bytes // SEGMENTS_AT_LEAST))
        self._log = SegmentLog(self._folder, capacity_bytes, segment_bytes, clock, self._evicted)
        self._pages_at_once = max(1, min(_MOST_PAGES_READ, BATCH_BYTES // page_bytes))
        self._lookup = ThreadPoolExecutor(1, "kllm-store-lookup")
        self._readers = ThreadPoolExecutor(READERS, "kllm-store-read")
        self._writer = ThreadPoolExecutor(1, "kllm-store-write")
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False
        if self.read_only:
            logger.warning("KV store %s is used for reading only: %s", self._folder.path, self._folder.why_read_only)
        else:
            self._tidy()

    @property
    def read_only(self) -> bool:
        return self._folder.why_read_only is not None

    def _tidy(self) -> None:
        try:
            clean(self._folder)
        except (OSError, StoreError) as error:  # what is there can be read all the same
            logger.warning("KV store %s could not be tidied: %s", self._folder.path, error)

    # -- Store ---------------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> int:
        return await self._run(self._lookup, self._folder.index.leading, list(keys))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self._check(keys, into)
        call, size = _Call(), self._pages_at_once
        parts = [
            self._begin(self._readers, self._get, call, keys[i : i + size], into[i : i + size])
            for i in range(0, len(keys), size)
        ]
        await self._wait(call, parts)
        results = [part.result() for part in parts]
        damaged = [entry for _, bad in results for entry in bad]
        if damaged and not self.read_only:
            self._begin(self._writer, self._log.drop, damaged)
        return [there for got, _ in results for there in got]

    async def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        self._check(keys, pages)
        self._check_writable()
        call = _Call()
        written = self._begin(self._writer, self._put, call, list(keys), list(pages))
        await self._wait(call, [written])
        indexed = [self._follow(one) for one in written.result()]
        await self._wait(call, indexed)
        added = sum(one.result() for one in indexed)
        with self._counting:
            self.counts.bytes_written += added * self.page_bytes
        return added

    async def clear(self) -> None:
        self._check_writable()
        await self._run(self._writer, self._log.clear)

    async def idle(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.idle()
        try:
            if not self.read_only:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writer, self._log.close, self._uses.take(_USES_WRITTEN))
        except StoreError as error:  # the next store to open the folder finishes what is left
            logger.warning("KV store: %s", error)
        finally:
            for pool in (self._lookup, self._readers, self._writer):
                pool.shutdown()
            self._folder.close()

    # -- calls ---------------------------------------------------------------------------------------------------

    def _begin(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """It runs to its end, whoever stops waiting for it."""
        if self._closed:
            raise StoreError(f"{self._folder.path}: the store is closed")
        return self._follow(pool.submit(function, *arguments))

    def _follow(self, work: Future[T]) -> asyncio.Future[T]:
        future = asyncio.wrap_future(work)
        self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.debug("KV store %s: %s", self._folder.path, error)

    async def _wait(self, call: _Call, parts: Sequence[asyncio.Future[Any]]) -> None:
        """Until all have ended, whether well or not: none uses the caller's memory then."""
        if not parts:
            return
        try:
            await asyncio.wait(parts)
        except asyncio.CancelledError:
            call.wanted = False
            raise

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.shield(self._begin(pool, function, *arguments))

    def _check(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        for key, page in zip(keys, pages, strict=True):
            if not 0 < len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
            if page.nbytes != self.page_bytes or not page.c_contiguous:
                raise ValueError(f"a page is {self.page_bytes} bytes in one piece, not {page.nbytes}")

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"{self._folder.path} can only be read: {self._folder.why_read_only}")

    # -- on the threads ------------------------------------------------------------------------------------------

    def _get(
        self, call: _Call, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> tuple[list[bool], list[tuple[bytes, Location]]]:
        """Which are there, and those that turned out to be damaged."""
        if not call.wanted:
            return [False] * len(keys), []
        there = [False] * len(keys)
        wanted: dict[int, Wanted] = {}
        for i, location in enumerate(self._folder.index.find(keys)):
            if location is not None and location.length == self.page_bytes:
                wanted[i] = Wanted(keys[i], location, into[i])
        bad: list[tuple[bytes, Location]] = []
        outcomes = read_pages(self._folder.segments, list(wanted.values()))
        for (i, page), outcome in zip(wanted.items(), outcomes, strict=True):
            if outcome is Outcome.GOOD:
                there[i] = True
            elif outcome is not Outcome.GONE or self._still_indexed(page):
                bad.append((page.key, page.location))
        self._uses.note([(page.key, page.location) for i, page in wanted.items() if there[i]], self._clock())
        with self._counting:
            self.counts.bytes_read += sum(there) * self.page_bytes
            self.counts.corrupt += len(bad)
        if bad:
            logger.warning("KV store %s: %d damaged pages, not used", self._folder.path, len(bad))
        return there, bad

    def _still_indexed(self, page: Wanted) -> bool:
        """Of a page whose file is missing. An evicted one is not: the index forgets before the file goes."""
        return self._folder.index.find([page.key]) == [page.location]

    def _put(self, call: _Call, keys: list[bytes], pages: list[memoryview]) -> list[Future[int]]:
        if not call.wanted:
            return []
        fresh: dict[bytes, memoryview] = {}
        again: list[tuple[bytes, Location]] = []
        for key, page, location in zip(keys, pages, self._folder.index.find(keys), strict=True):
            if location is None:
                fresh.setdefault(key, page)
            else:
                again.append((key, location))
        self._uses.note(again, self._clock())
        if not fresh:
            return []
        return self._log.put(list(fresh.items()), self._uses.take(_USES_WRITTEN), lambda: call.wanted)

    def _evicted(self, pages: int) -> None:
        with self._counting:
            self.counts.evicted += pages
