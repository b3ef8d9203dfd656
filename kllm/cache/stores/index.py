"""The index of a store folder, in LMDB: which page is where. One transaction a method; a commit is on the disk.

    pages     key                  -> segment, offset, length, checksum, reused since it was written
    places    segment, offset      -> key                             (big-endian: a segment's pages lie together)
    segments  segment              -> SegmentRow
    totals    b""                  -> next segment number, bytes charged

Capacity is counted in charges: a segment that is being written is charged the size it may reach, a sealed one its size.
So the bound needs to be checked only when a segment begins, and holds at every moment.
"""

from __future__ import annotations

import heapq
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb

from kllm.cache.stores.segment import FILE_MODE, HEADER_BYTES, Location
from kllm.cache.stores.store import StoreError

_LOCATION = struct.Struct("<QQQQ?")
_PLACE = struct.Struct(">QQ")
_NUMBER = struct.Struct(">Q")
_ROW = struct.Struct("<QQQdd?")
_TOTALS = struct.Struct("<QQ")
_POLITE = 64  # entries handled in a row, at most about 0.1 ms, before the interpreter lock is offered to other threads
_SPARE_MAP_BYTES = 64 << 20
_INDEX_BYTES_PER_PAGE = 512  # of both tables, half-filled tree pages and copies that transactions keep included
_MAX_READERS = 1024

T = TypeVar("T")


class SegmentRow(NamedTuple):
    """pages, page_bytes: of what is indexed in it. created, used: seconds since 1970. sealed: nobody writes it."""

    pages: int
    page_bytes: int
    charge: int
    created: float
    used: float
    sealed: bool


class Addition(NamedTuple):
    """A page to index. moved_from: where it was; the entry is changed only if it is still there."""

    key: bytes
    location: Location
    moved_from: Location | None = None


class Resident(NamedTuple):
    key: bytes
    location: Location
    reused: bool


class Uses(NamedTuple):
    """What was read since the last time this was written down."""

    segments: Mapping[int, float]
    keys: Sequence[bytes]


def map_bytes(capacity_bytes: int, page_bytes: int) -> int:
    """Size of the memory map: address space, which costs nothing until it is filled. An eighth of the capacity is room
    for pages of other models, down to 4 KiB."""
    pages = capacity_bytes // (page_bytes + HEADER_BYTES) + 1
    return _SPARE_MAP_BYTES + max(capacity_bytes // 8, pages * _INDEX_BYTES_PER_PAGE)


class _Shared:
    """An environment and its tables, opened once for all stores of a folder in this process, as LMDB wants it."""

    def __init__(self, path: Path, map_size: int, read_only: bool, lock: bool) -> None:
        self.read_only = read_only
        self.users = 0
        self.environment = _open_environment(path, map_size, read_only, lock)
        try:
            self.tables = [
                self.environment.open_db(name, create=not read_only)
                for name in (b"pages", b"places", b"segments", b"totals")
            ]
        except BaseException:
            self.environment.close()
            raise


class _Environments:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Shared] = {}

    def take(self, path: Path, map_size: int, read_only: bool, lock: bool) -> _Shared:
        name = os.path.realpath(path)
        with self._lock:
            shared = self._open.get(name)
            if shared is None:
                shared = self._open[name] = _Shared(path, map_size, read_only, lock)
            elif shared.read_only and not read_only:
                raise StoreError(f"{path} is open for reading in this process and cannot be written")
            shared.users += 1
            return shared

    def give_back(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users == 0:
                self._open = {name: other for name, other in self._open.items() if other is not shared}
                shared.environment.close()


def _open_environment(path: Path, map_size: int, read_only: bool, lock: bool) -> lmdb.Environment:
    environment = lmdb.open(
        os.fspath(path),
        map_size=map_size,
        readonly=read_only,
        lock=lock,
        create=not read_only,
        mode=FILE_MODE,
        max_dbs=4,
        max_readers=_MAX_READERS,
        max_spare_txns=8,
    )
    if lock:
        environment.reader_check()  # slots of processes that were killed
    return environment


_environments = _Environments()


class Index:
    """Methods may be called from any thread, and raise StoreError. map_size 0: as large as it is.

    lock: register readers, so that writers do not reuse what they look at; needs a lock file that can be written.
    Without it transactions that read are kept so short that this does not matter in practice, and whatever is read from
    a page that was reused, headers and checksums decide about the page of KV.
    """

    def __init__(self, path: Path, map_size: int, *, read_only: bool, lock: bool = True) -> None:
        self.path = path
        self.read_only = read_only
        with self._errors():
            self._shared = _environments.take(path, map_size, read_only, lock)
            self._environment = self._shared.environment
            self._pages, self._places, self._segments, self._totals = self._shared.tables
        self._closed = False
        self._read_ahead()

    def _read_ahead(self) -> None:
        """A lookup that waits for the disk would hold the interpreter lock: have the index in memory."""
        if not hasattr(os, "posix_fadvise"):
            return
        fd = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _environments.give_back(self._shared)

    # -- transactions --------------------------------------------------------------------------------------------

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreError(f"{self.path}: the index is full: the pages are smaller than expected") from error
        except lmdb.MapResizedError as error:
            raise StoreError(f"{self.path}: the index has outgrown this process; restart it") from error
        except lmdb.ReadonlyError as error:
            raise StoreError(f"{self.path} is read-only") from error
        except lmdb.Error as error:
            raise StoreError(f"{self.path}: the index cannot be used: {error}") from error
        except OSError as error:
            raise StoreError(f"{self.path}: the index cannot be used: {error.strerror}") from error

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction[bytes]]:
        with self._errors(), self._environment.begin() as transaction:
            yield transaction

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction[bytes]]:
        if self.read_only:
            raise StoreError(f"{self.path} is read-only")
        with self._errors(), self._environment.begin(write=True) as transaction:
            yield transaction

    def _row(self, transaction: lmdb.Transaction[bytes], number: int) -> SegmentRow | None:
        raw = transaction.get(_NUMBER.pack(number), db=self._segments)
        return None if raw is None else SegmentRow(*_ROW.unpack(raw))

    def _set_row(self, transaction: lmdb.Transaction[bytes], number: int, row: SegmentRow) -> None:
        transaction.put(_NUMBER.pack(number), _ROW.pack(*row), db=self._segments)

    def _get_totals(self, transaction: lmdb.Transaction[bytes]) -> tuple[int, int]:
        raw = transaction.get(b"totals", db=self._totals)
        return (1, 0) if raw is None else _TOTALS.unpack(raw)

    def _charge(self, transaction: lmdb.Transaction[bytes], more: int) -> None:
        following, charged = self._get_totals(transaction)
        transaction.put(b"totals", _TOTALS.pack(following, max(0, charged + more)), db=self._totals)

    # -- reading -------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Location | None]:
        found: list[Location | None] = []
        for part in _politely(keys):
            with self._read() as transaction:
                found += [_location(transaction.get(key, db=self._pages)) for key in part]
        return found

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there."""
        there = 0
        for part in _politely(keys):
            with self._read() as transaction:
                for key in part:
                    if transaction.get(key, db=self._pages) is None:
                        return there
                    there += 1
        return there

    def rows(self) -> Iterator[tuple[int, SegmentRow]]:
        """All segments by number."""
        first = 0
        while True:
            with self._read() as transaction:
                part = self._rows_from(transaction, first, _POLITE)
            if not part:
                return
            yield from part
            first = part[-1][0] + 1
            time.sleep(0)

    def coldest(self, most: int) -> list[tuple[int, SegmentRow]]:
        """Segments that were not used for longest, the longest first."""
        coldest: list[tuple[int, SegmentRow]] = []
        rows = self.rows()
        while part := list(islice(rows, _POLITE)):
            coldest = heapq.nsmallest(most, coldest + part, key=lambda item: item[1].used)
        return coldest

    def _rows_from(self, transaction: lmdb.Transaction[bytes], first: int, most: int) -> list[tuple[int, SegmentRow]]:
        cursor = transaction.cursor(self._segments)
        rows: list[tuple[int, SegmentRow]] = []
        if cursor.set_range(_NUMBER.pack(first)):
            for raw_number, raw in cursor:
                rows.append((_NUMBER.unpack(raw_number)[0], SegmentRow(*_ROW.unpack(raw))))
                if len(rows) == most:
                    break
        return rows

    def residents(self, number: int, first_offset: int = 0, most: int = _POLITE) -> list[Resident]:
        """Pages of a segment from an offset on, in the order of their places."""
        with self._read() as transaction:
            return list(self._residents(transaction, number, first_offset, most))

    def _residents(
        self, transaction: lmdb.Transaction[bytes], number: int, first: int, most: int
    ) -> Iterator[Resident]:
        cursor = transaction.cursor(self._places)
        if not cursor.set_range(_PLACE.pack(number, first)):
            return
        for raw_place, key in cursor:
            segment, offset = _PLACE.unpack(raw_place)
            if segment != number or most == 0:
                return
            raw = transaction.get(key, db=self._pages)
            location = _location(raw)
            if raw is not None and location is not None and (location.segment, location.offset) == (segment, offset):
                yield Resident(bytes(key), location, _LOCATION.unpack(raw)[4])
                most -= 1

    def charged(self) -> int:
        with self._read() as transaction:
            return self._get_totals(transaction)[1]

    def page_count(self) -> int:
        with self._read() as transaction:
            return int(transaction.stat(self._pages)["entries"])

    # -- segments ------------------------------------------------------------------------------------------------

    def begin_segment(self, charge: int, capacity: int, now: float, create: Callable[[int], T]) -> T | None:
        """The result of create(number), which makes the segment's file; None if the capacity has no room for it. Both
        happen while no other process can begin, clean or remove segments."""
        with self._write() as transaction:
            number, charged = self._get_totals(transaction)
            if charged + charge > capacity:
                return None
            self._set_row(transaction, number, SegmentRow(0, 0, charge, now, now, sealed=False))
            transaction.put(b"totals", _TOTALS.pack(number + 1, charged + charge), db=self._totals)
            return create(number)

    def seal(self, number: int, size: int) -> bool:
        """It will not be written any more. False: nothing in it is indexed, and it is forgotten."""
        with self._write() as transaction:
            row = self._row(transaction, number)
            if row is None:
                return False
            if row.pages == 0:
                self._forget_row(transaction, number, row)
                return False
            self._set_row(transaction, number, row._replace(charge=size, sealed=True))
            self._charge(transaction, size - row.charge)
            return True

    def _forget_row(self, transaction: lmdb.Transaction[bytes], number: int, row: SegmentRow) -> None:
        transaction.delete(_NUMBER.pack(number), db=self._segments)
        self._charge(transaction, -row.charge)

    def remove_segment(self, number: int) -> int:
        """Forget a segment and all that is in it. Returns pages forgotten. In several transactions: a process that is
        killed in between leaves a smaller segment."""
        removed = 0
        while True:
            with self._write() as transaction:
                row = self._row(transaction, number)
                places = list(self._places_of(transaction, number, _POLITE))
                for place, key in places:
                    transaction.delete(place, db=self._places)
                    location = _location(transaction.get(key, db=self._pages))
                    if location is not None and location.segment == number:
                        transaction.delete(key, db=self._pages)
                        removed += 1
                if len(places) < _POLITE:
                    if row is not None:
                        self._forget_row(transaction, number, row)
                    return removed
            time.sleep(0)

    def _places_of(self, transaction: lmdb.Transaction[bytes], number: int, most: int) -> Iterator[tuple[bytes, bytes]]:
        cursor = transaction.cursor(self._places)
        if cursor.set_range(_PLACE.pack(number, 0)):
            for place, key in cursor:
                if most == 0 or _PLACE.unpack(place)[0] != number:
                    return
                yield place, key
                most -= 1

    def end_of(self, number: int) -> int:
        """Bytes of a segment, from its beginning, that indexed pages reach to."""
        with self._read() as transaction:
            cursor = transaction.cursor(self._places)
            positioned = cursor.set_range(_PLACE.pack(number + 1, 0))
            while cursor.prev() if positioned else cursor.last():
                positioned = True
                segment, offset = _PLACE.unpack(cursor.key())
                if segment != number:
                    break
                location = _location(transaction.get(cursor.value(), db=self._pages))
                if location is not None and (location.segment, location.offset) == (segment, offset):
                    return location.end
            return 0

    @contextmanager
    def exclusively(self) -> Iterator[list[tuple[int, SegmentRow]]]:
        """All segments, of which no process can begin, seal or remove one meanwhile. Other methods must wait too."""
        with self._write() as transaction:
            yield self._rows_from(transaction, 0, 1 << 62)

    # -- pages ---------------------------------------------------------------------------------------------------

    def add(self, number: int, additions: Sequence[Addition], uses: Uses, now: float) -> int:
        """Index pages of a segment. Returns how many: not those that somebody else has indexed meanwhile."""
        with self._write() as transaction:
            row = self._row(transaction, number)
            if row is None:
                raise StoreError(f"{self.path}: segment {number} was removed while it was written")
            added = [page for page in self._resting(additions) if self._add(transaction, page)]
            size = sum(page.location.length for page in added)
            self._set_row(
                transaction,
                number,
                row._replace(pages=row.pages + len(added), page_bytes=row.page_bytes + size, used=now),
            )
            self._note_uses(transaction, uses)
            return len(added)

    @staticmethod
    def _resting(entries: Sequence[T]) -> Iterator[T]:
        """One after the other, giving way to other threads again and again."""
        for part in _politely(entries):
            yield from part

    def _add(self, transaction: lmdb.Transaction[bytes], page: Addition) -> bool:
        raw = _LOCATION.pack(*page.location, False)
        if page.moved_from is None:
            if not transaction.put(page.key, raw, overwrite=False, db=self._pages):
                return False
        else:
            if _location(transaction.get(page.key, db=self._pages)) != page.moved_from:
                return False
            self._leave(transaction, page.moved_from)
            transaction.put(page.key, raw, db=self._pages)
        transaction.put(_PLACE.pack(page.location.segment, page.location.offset), page.key, db=self._places)
        return True

    def _leave(self, transaction: lmdb.Transaction[bytes], location: Location) -> SegmentRow | None:
        """Take a page out of the books of its segment. Returns what the segment has left."""
        transaction.delete(_PLACE.pack(location.segment, location.offset), db=self._places)
        row = self._row(transaction, location.segment)
        if row is None:
            return None
        row = row._replace(pages=row.pages - 1, page_bytes=row.page_bytes - location.length)
        self._set_row(transaction, location.segment, row)
        return row

    def note_uses(self, uses: Uses) -> None:
        with self._write() as transaction:
            self._note_uses(transaction, uses)

    def _note_uses(self, transaction: lmdb.Transaction[bytes], uses: Uses) -> None:
        for number, used in self._resting(list(uses.segments.items())):
            row = self._row(transaction, number)
            if row is not None and row.used < used:
                self._set_row(transaction, number, row._replace(used=used))
        for key in self._resting(uses.keys):
            location = _location(transaction.get(key, db=self._pages))
            if location is not None:
                transaction.put(key, _LOCATION.pack(*location, True), db=self._pages)

    def drop(self, entries: Iterable[tuple[bytes, Location]]) -> list[int]:
        """Forget these pages where the index still says so. Returns sealed segments that are empty and forgotten now:
        their files are the caller's to remove."""
        empty: list[int] = []
        with self._write() as transaction:
            for key, location in self._resting(list(entries)):
                if _location(transaction.get(key, db=self._pages)) != location:
                    continue
                transaction.delete(key, db=self._pages)
                row = self._leave(transaction, location)
                if row is not None and row.sealed and row.pages == 0:
                    self._forget_row(transaction, location.segment, row)
                    empty.append(location.segment)
        return empty

    def clear(self, keep: Callable[[int], bool]) -> list[int]:
        """Forget all pages, and all segments but those to keep (others are writing them). Returns those forgotten."""
        gone: list[int] = []
        with self._write() as transaction:
            transaction.drop(self._pages, delete=False)
            transaction.drop(self._places, delete=False)
            for number, row in self._rows_from(transaction, 0, 1 << 62):
                if keep(number):
                    self._set_row(transaction, number, row._replace(pages=0, page_bytes=0))
                else:
                    self._forget_row(transaction, number, row)
                    gone.append(number)
        return gone


def _location(raw: bytes | None) -> Location | None:
    return None if raw is None else Location._make(_LOCATION.unpack(raw)[:4])


def _politely(entries: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(entries), _POLITE):
        if start:
            time.sleep(0)
        yield entries[start : start + _POLITE]
