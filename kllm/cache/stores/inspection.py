"""What `kllm cache` shows and does: the contents of a store folder, a check of every page, clearing it.

All of it may run while instances use the store. Functions raise StoreError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kllm.cache.block_hash import HASH_BYTES
from kllm.cache.stores.folder import FORMAT, StoreFolder, explain, open_folder
from kllm.cache.stores.index import Resident
from kllm.cache.stores.segment import Outcome, Wanted, is_written, read_pages, segment_path
from kllm.cache.stores.segment_log import BATCH_BYTES, clean, clear_folder
from kllm.cache.stores.store import StoreError

_GROUP_BYTES = 1  # of a key, after the block's hash; the layout's fingerprint follows
_MOST_AT_ONCE = 64


class SegmentSummary(msgspec.Struct):
    """file_bytes: 0 if the file is missing. created, used: seconds since 1970. active: somebody is writing it."""

    name: str
    pages: int
    page_bytes: int
    file_bytes: int
    created: float
    used: float
    active: bool


class FingerprintSummary(msgspec.Struct):
    """Pages of one model and layout. groups: of its KV that have pages here."""

    fingerprint: str
    groups: list[int]
    pages: int
    bytes: int


class StoreSummary(msgspec.Struct):
    """bytes: of pages. file_bytes: of segment files. index_bytes: of the index's file. oldest_use_s: age in seconds of
    the last use of the segment that would be evicted first; None if there are no segments."""

    path: str
    format: int
    pages: int
    bytes: int
    file_bytes: int
    index_bytes: int
    oldest_use_s: float | None
    newest_use_s: float | None
    fingerprints: list[FingerprintSummary]
    segments: list[SegmentSummary]


class BadPage(msgspec.Struct):
    segment: str
    offset: int
    key: str
    reason: str


class Findings(msgspec.Struct):
    """Of a check. repaired: bad pages are not indexed any more."""

    pages: int
    bytes: int
    bad: list[BadPage]
    repaired: bool


def inspect(path: Path) -> StoreSummary:
    folder = open_folder(path, read_only=True)
    try:
        return _summary(folder)
    except OSError as error:
        raise explain(path, error) from error
    finally:
        folder.close()


def _summary(folder: StoreFolder) -> StoreSummary:
    segments: list[SegmentSummary] = []
    kinds: dict[str, FingerprintSummary] = {}
    for number, row in folder.index.rows():
        file = segment_path(folder.segments, number)
        size = file.stat().st_size if file.exists() else 0
        active = not row.sealed and is_written(file)
        segments.append(SegmentSummary(file.stem, row.pages, row.page_bytes, size, row.created, row.used, active))
        for page in _residents(folder, number):
            _count(kinds, page)
    now = time.time()
    uses = [segment.used for segment in segments]
    return StoreSummary(
        path=str(folder.path),
        format=FORMAT,
        pages=sum(kind.pages for kind in kinds.values()),
        bytes=sum(kind.bytes for kind in kinds.values()),
        file_bytes=sum(segment.file_bytes for segment in segments),
        index_bytes=(folder.path / "index" / "data.mdb").stat().st_size,
        oldest_use_s=max(0.0, now - min(uses)) if uses else None,
        newest_use_s=max(0.0, now - max(uses)) if uses else None,
        fingerprints=sorted(kinds.values(), key=lambda kind: -kind.bytes),
        segments=segments,
    )


def _residents(folder: StoreFolder, number: int) -> Iterator[Resident]:
    offset = 0
    while part := folder.index.residents(number, offset):
        yield from part
        offset = part[-1].location.end


def _count(kinds: dict[str, FingerprintSummary], page: Resident) -> None:
    group, fingerprint = page.key[HASH_BYTES : HASH_BYTES + _GROUP_BYTES], page.key[HASH_BYTES + _GROUP_BYTES :].hex()
    kind = kinds.setdefault(fingerprint, FingerprintSummary(fingerprint, [], 0, 0))
    if group and group[0] not in kind.groups:
        kind.groups = sorted([*kind.groups, group[0]])
    kind.pages += 1
    kind.bytes += page.location.length


def page_count(path: Path) -> int:
    folder = open_folder(path, read_only=True)
    try:
        return folder.index.page_count()
    finally:
        folder.close()


def verify(path: Path, *, repair: bool, on_pages: Callable[[int], None]) -> Findings:
    """Read every page and check it. repair: forget bad ones. on_pages: called with how many more were checked."""
    folder = open_folder(path, read_only=not repair)
    try:
        if repair and folder.why_read_only is not None:
            raise StoreError(f"{path} cannot be repaired: {folder.why_read_only}")
        findings = Findings(0, 0, [], repaired=repair)
        for number, _ in folder.index.rows():
            for pages in _batches(folder, number):
                _verify_pages(folder, pages, findings)
                on_pages(len(pages))
        if repair:
            clean(folder)
        return findings
    except OSError as error:
        raise explain(path, error) from error
    finally:
        folder.close()


def _batches(folder: StoreFolder, number: int) -> Iterator[list[Resident]]:
    """The pages of a segment, as many as are read at once."""
    batch: list[Resident] = []
    size = 0
    for page in _residents(folder, number):
        batch.append(page)
        size += page.location.length
        if size >= BATCH_BYTES or len(batch) == _MOST_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _verify_pages(folder: StoreFolder, pages: Sequence[Resident], findings: Findings) -> None:
    wanted = [Wanted(page.key, page.location, memoryview(bytearray(page.location.length))) for page in pages]
    bad: list[Wanted] = []
    for page, outcome in zip(wanted, read_pages(folder.segments, wanted), strict=True):
        if outcome is Outcome.GONE and folder.index.find([page.key]) != [page.location]:
            continue  # evicted meanwhile
        findings.pages += 1
        findings.bytes += page.location.length
        if outcome is not Outcome.GOOD:
            bad.append(page)
            name = segment_path(folder.segments, page.location.segment).stem
            findings.bad.append(BadPage(name, page.location.offset, page.key.hex(), outcome.value))
    if bad and findings.repaired:
        for number in folder.index.drop((page.key, page.location) for page in bad):
            segment_path(folder.segments, number).unlink(missing_ok=True)


def clear(path: Path) -> int:
    """Returns how many pages there were."""
    folder = open_folder(path)
    try:
        if folder.why_read_only is not None:
            raise StoreError(f"{path} cannot be cleared: {folder.why_read_only}")
        pages = folder.index.page_count()
        clear_folder(folder)
        return pages
    finally:
        folder.close()
