"""Segment files by themselves."""

from __future__ import annotations

import os

import pytest
from support.disk_stores import key, page

from kllm.cache.stores.segment import (
    HEADER_BYTES,
    ActiveSegment,
    Outcome,
    Wanted,
    is_written,
    lock_idle,
    read_pages,
    segment_number,
    segment_path,
)


def written(folder, numbers, size=1000):
    """A segment with these pages, and what to ask for to read them."""
    segment = ActiveSegment(folder, 7, 1 << 20)
    locations = [segment.stage(key(number), memoryview(page(number, size))) for number in numbers]
    segment.sync()
    return segment, [
        Wanted(key(number), location, memoryview(bytearray(size)))
        for number, location in zip(numbers, locations, strict=True)
    ]


def test_adjacent_records_are_read_with_one_call(tmp_path, monkeypatch):
    segment, wanted = written(tmp_path, range(10))
    segment.close()
    calls = []
    real = os.preadv

    def counted(fd, buffers, offset):
        calls.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    chosen = [wanted[i] for i in (8, 1, 2, 3, 9, 5)]
    assert read_pages(tmp_path, chosen) == [Outcome.GOOD] * 6
    assert calls == [(HEADER_BYTES + 1000) * i for i in (1, 5, 8)]
    assert [bytes(one.into) for one in chosen] == [page(i, 1000) for i in (8, 1, 2, 3, 9, 5)]


def test_a_record_of_another_key_is_wrong(tmp_path):
    segment, (wanted,) = written(tmp_path, [1])
    segment.close()
    assert read_pages(tmp_path, [wanted._replace(key=key(2))]) == [Outcome.WRONG]


def test_what_was_not_synced_is_trimmed(tmp_path):
    segment, wanted = written(tmp_path, [1])
    size = segment.path.stat().st_size
    segment.stage(key(2), memoryview(page(2)))
    segment.write()
    assert segment.path.stat().st_size > size
    segment.trim()
    segment.close()
    assert segment.path.stat().st_size == size == segment.synced
    assert read_pages(tmp_path, wanted) == [Outcome.GOOD]


def test_a_segment_is_locked_as_long_as_it_is_written(tmp_path):
    segment, _ = written(tmp_path, [1])
    assert is_written(segment.path)
    assert lock_idle(segment.path) is None
    with pytest.raises(FileExistsError):
        ActiveSegment(tmp_path, 7, 1 << 20)
    segment.close()
    assert not is_written(segment.path)
    fd = lock_idle(segment.path)
    assert fd is not None
    os.close(fd)
    segment.path.unlink()
    assert not is_written(segment.path)


def test_names_of_segments(tmp_path):
    assert segment_number(segment_path(tmp_path, 0xAB)) == 0xAB
    for name in ("ab.segment", "00000000000000ag.segment", "00000000000000ab.tmp", "lost+found"):
        assert segment_number(tmp_path / name) is None
