"""SegmentLog: the writing side of a store folder. Appends, keeps the bound, cleans up.

    put     stage ─► write 4 MiB at a time ─► fdatasync the segment ─► index, committed with a sync
    evict   the segment that was not used for longest: its reused pages are copied to the active segment if they are
            less than half of it, then the index forgets it, then its file is removed. Readers that come too late miss.

One thread calls it; another one, of its own, adds what is on the disk to the index, while the next put is written: a
commit of the index takes as long as writing a few MiB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from kllm.cache.stores.folder import StoreFolder, explain
from kllm.cache.stores.index import Addition, Resident, Uses
from kllm.cache.stores.segment import (
    HEADER_BYTES,
    ActiveSegment,
    Location,
    Outcome,
    Wanted,
    lock_idle,
    read_pages,
    segment_number,
    segment_path,
)
from kllm.cache.stores.store import StoreError

logger = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20  # written with one call
COMMIT_BYTES = 32 << 20  # synced and indexed together at most
SEGMENTS_AT_LEAST = 16  # that the capacity is divided into, so that evicting one loses little
_CANDIDATES = 64  # for eviction; some may be in use by other processes
Page = tuple[bytes, memoryview]


def clean(folder: StoreFolder) -> None:
    """Put in order what killed processes left: seal their segments, remove files and rows that belong to nothing."""
    index = folder.index
    with ExitStack() as locks:
        abandoned: list[int] = []
        with index.exclusively() as rows:
            files = {number for path in folder.segments.iterdir() if (number := segment_number(path)) is not None}
            for number in files.difference(number for number, _ in rows):
                segment_path(folder.segments, number).unlink(missing_ok=True)
            lost = [number for number, _ in rows if number not in files]
            for number in (number for number, row in rows if not row.sealed and number in files):
                fd = lock_idle(segment_path(folder.segments, number))
                if fd is not None:
                    locks.callback(os.close, fd)
                    abandoned.append(number)
        for number in lost:
            logger.warning("KV store %s: segment %016x is missing, its pages are lost", folder.path, number)
            index.remove_segment(number)
        for number in abandoned:
            _seal(folder, number)


def _seal(folder: StoreFolder, number: int) -> None:
    """Of a segment that nobody writes, and that the caller has locked."""
    path = segment_path(folder.segments, number)
    end = min(folder.index.end_of(number), path.stat().st_size)
    os.truncate(path, end)
    if not folder.index.seal(number, end):
        path.unlink(missing_ok=True)


class SegmentLog:
    """on_evicted: called with a number of pages. Methods raise StoreError."""

    def __init__(
        self,
        folder: StoreFolder,
        capacity_bytes: int,
        segment_bytes: int,
        clock: Callable[[], float],
        on_evicted: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._index = folder.index
        self._capacity = capacity_bytes
        self._limit = segment_bytes
        self._clock = clock
        self._on_evicted = on_evicted
        self._active: ActiveSegment | None = None
        self._staged: list[Addition] = []
        self._uses = Uses({}, ())
        self._indexer = ThreadPoolExecutor(1, "kllm-store-index")
        self._indexing: list[Future[int]] = []  # of the active segment

    # -- putting -------------------------------------------------------------------------------------------------

    def put(self, pages: Sequence[Page], uses: Uses, wanted: Callable[[], bool]) -> list[Future[int]]:
        """Write pages; when this returns their memory is not used any more. The results are known when they survive
        everything: pages added to the index, which are not those that somebody else has added meanwhile, or StoreError.
        wanted: asked before each batch; once it says no, the rest is left out. uses: written down by the way."""
        self._uses = uses
        results: list[Future[int]] = []
        try:
            for key, page in pages:
                if self._active is None or not self._active.fits(page.nbytes):
                    results += self._sync()
                    self._next_segment(page.nbytes)
                active = self._active
                assert active is not None
                self._staged.append(Addition(key, active.stage(key, page)))
                if active.staged_bytes >= BATCH_BYTES:
                    active.write()
                    if not wanted():
                        break
                if active.unsynced_bytes >= COMMIT_BYTES:
                    results += self._sync()
            return results + self._sync()
        except OSError as error:
            self._abandon()
            raise explain(self._folder.path, error) from error
        except BaseException:
            self._abandon()
            raise

    def _sync(self) -> list[Future[int]]:
        """What is staged is on the disk; the index follows. One result, or none if nothing is staged."""
        active, staged, uses = self._active, self._staged, self._uses
        if active is None or not staged:
            return []
        active.sync()
        self._staged, self._uses = [], Uses({}, ())
        self._indexing = [one for one in self._indexing if not one.done()]
        self._indexing.append(self._indexer.submit(self._index.add, active.number, staged, uses, self._clock()))
        return self._indexing[-1:]

    def _settle(self) -> None:
        """Until the index has followed. Whether well or not, those who put it are told."""
        wait(self._indexing)
        self._indexing = []

    def _note_uses(self) -> None:
        uses, self._uses = self._uses, Uses({}, ())
        if uses.segments or uses.keys:
            self._index.note_uses(uses)

    def _retire(self) -> None:
        """Seal the active segment."""
        self._settle()
        active, self._active = self._active, None
        if active is None:
            return
        try:
            active.trim()
            if not self._index.seal(active.number, active.synced):
                active.path.unlink(missing_ok=True)
        finally:
            active.close()

    def _abandon(self) -> None:
        """After an error: give back what is not kept, so that a full disk is not left fuller than it was."""
        self._staged = []
        try:
            self._retire()
        except (OSError, StoreError) as error:  # the next process to open the store seals it
            logger.debug("KV store %s: a segment is left as it is: %s", self._folder.path, error)

    def close(self, uses: Uses) -> None:
        self._uses = uses
        try:
            self._note_uses()
            self._retire()
        except OSError as error:
            raise explain(self._folder.path, error) from error
        finally:
            self._indexer.shutdown()
            if self._active is not None:
                self._active.close()

    # -- room ----------------------------------------------------------------------------------------------------

    def _next_segment(self, length: int) -> None:
        """A new active segment, for a page of `length` bytes. Room for one more is made afterwards, when there is a
        place for pages that move."""
        if HEADER_BYTES + length > self._limit:
            raise StoreError(f"{self._folder.path}: a page of {length:,} bytes is larger than a segment")
        self._note_uses()
        self._retire()
        while not self._create():
            if not self._evict():
                raise StoreError(
                    f"{self._folder.path}: the capacity of {self._capacity:,} bytes is taken up by segments that other "
                    "processes are writing; give the store a higher capacity"
                )
        while self._index.charged() + self._limit > self._capacity and self._evict():
            pass

    def _create(self) -> bool:
        made: list[ActiveSegment] = []

        def create(number: int) -> None:
            segment_path(self._folder.segments, number).unlink(missing_ok=True)  # of a creation that was cut short
            made.append(ActiveSegment(self._folder.segments, number, self._limit))

        try:
            self._index.begin_segment(self._limit, self._capacity, self._clock(), create)
        except BaseException:
            for segment in made:
                segment.path.unlink(missing_ok=True)
                segment.close()
            raise
        self._active = made[0] if made else None
        return bool(made)

    def _evict(self) -> bool:
        """Give up the segment that was not used for longest. False: there is none that nobody writes."""
        for number, row in self._index.coldest(_CANDIDATES):
            path = segment_path(self._folder.segments, number)
            fd = lock_idle(path)
            if fd is None and (not row.sealed or path.exists()):
                continue  # being written, or evicted by somebody else
            try:
                self._give_up(number, row.charge)
            finally:
                if fd is not None:
                    os.close(fd)
            return True
        return False

    def _give_up(self, number: int, size: int) -> None:
        moved = self._move_reused(number, size)
        lost = self._index.remove_segment(number)
        segment_path(self._folder.segments, number).unlink(missing_ok=True)
        self._on_evicted(lost)
        logger.debug("KV store %s: evicted %d pages, moved %d", self._folder.path, lost, moved)

    def _move_reused(self, number: int, size: int) -> int:
        """Returns pages moved to the active segment. size: of the segment that is given up."""
        active = self._active
        if active is None:
            return 0
        reused: list[Resident] = []
        cost = offset = 0
        while residents := self._index.residents(number, offset):
            part = [page for page in residents if page.reused]
            reused += part
            cost += sum(HEADER_BYTES + page.location.length for page in part)
            offset = residents[-1].location.end
        if not reused or 2 * cost >= size or active.synced + cost > active.limit:
            return 0
        at_once = max(1, BATCH_BYTES * len(reused) // cost)
        moves: list[Addition] = []
        for start in range(0, len(reused), at_once):
            moves += self._copy(active, reused[start : start + at_once])
        active.sync()
        return self._index.add(active.number, moves, Uses({}, ()), self._clock())

    def _copy(self, active: ActiveSegment, pages: Sequence[Resident]) -> list[Addition]:
        """Write pages anew, but damaged ones."""
        wanted = [Wanted(page.key, page.location, memoryview(bytearray(page.location.length))) for page in pages]
        outcomes = read_pages(self._folder.segments, wanted)
        good = [page for page, outcome in zip(wanted, outcomes, strict=True) if outcome is Outcome.GOOD]
        moves = [Addition(page.key, active.stage(page.key, page.into), page.location) for page in good]
        active.write()
        return moves

    # -- forgetting ----------------------------------------------------------------------------------------------

    def drop(self, entries: Sequence[tuple[bytes, Location]]) -> None:
        """Pages that turned out to be damaged."""
        for number in self._index.drop(entries):
            segment_path(self._folder.segments, number).unlink(missing_ok=True)

    def clear(self) -> None:
        """All pages and all segments, but the files that other processes are writing: those get empty."""
        self._retire()
        clear_folder(self._folder)


def clear_folder(folder: StoreFolder) -> None:
    """Raises StoreError."""
    with ExitStack() as locks:

        def keep(number: int) -> bool:
            path: Path = segment_path(folder.segments, number)
            fd = lock_idle(path)
            if fd is None:
                return path.exists()
            locks.callback(os.close, fd)
            return False

        try:
            for number in folder.index.clear(keep):
                segment_path(folder.segments, number).unlink(missing_ok=True)
        except OSError as error:
            raise explain(folder.path, error) from error
