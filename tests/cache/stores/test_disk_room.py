"""DiskStore at its capacity: what is evicted, what stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disk_stores import PAGE, Pages, flip_bit, open_pages, segment_bytes, segments

from kllm.cache.stores.segment import HEADER_BYTES
from kllm.cache.stores.store import StoreError

RECORD = HEADER_BYTES + PAGE


class Clock:
    """Seconds that pass when asked for, so that uses have an order."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def small(folder: Path, clock: Clock | None = None) -> Pages:
    """Sixteen segments of 16 pages."""
    return Pages(folder, 256 * RECORD, clock=clock or Clock())


def test_the_bound_holds_at_every_moment_and_the_oldest_go_first(tmp_path):
    pages = small(tmp_path)
    for first in range(0, 420, 10):
        pages.put(range(first, first + 10))
        assert segment_bytes(tmp_path) <= 256 * RECORD
        assert pages.exists(range(first, first + 10)) == 10
    found = pages.got(range(420))
    assert found == list(range(found[0], 420))
    assert len(found) >= 224
    assert pages.store.counts.evicted == 420 - len(found)
    assert pages.store.counts.corrupt == 0
    pages.close()


def test_segments_that_are_used_stay(tmp_path):
    pages = small(tmp_path)
    pages.put(range(16))
    for first in range(16, 400, 16):
        assert len(pages.got(range(16))) == 16
        pages.put(range(first, first + 16))
    assert len(pages.got(range(16))) == 16
    pages.close()


def test_reused_pages_of_a_segment_that_goes_are_kept_if_they_are_few(tmp_path):
    pages = small(tmp_path)
    pages.put(range(32))
    pages.got([3, 4])
    pages.got(range(16, 32))  # too many to be moved
    pages.put(range(32, 270))
    assert pages.exists([3, 4]) == 2
    assert pages.exists([0]) == pages.exists([16]) == 0
    pages.put(range(300, 540))  # not used since they were moved
    assert pages.got([3, 4]) == []
    pages.close()


def test_moved_pages_are_whole_and_survive_a_restart(tmp_path):
    clock = Clock()
    pages = small(tmp_path, clock)
    pages.put(range(16))
    pages.got([3, 4])
    flip_bit(segments(tmp_path)[0], 3 * RECORD + 200)
    pages.put(range(32, 270))
    assert pages.got(range(16)) == [4]
    pages.close()
    reopened = small(tmp_path, clock)
    assert reopened.got(range(16)) == [4]
    reopened.close()


def test_uses_are_remembered_over_a_restart(tmp_path):
    clock = Clock()
    pages = small(tmp_path, clock)
    pages.put(range(224))
    pages.got(range(16))
    pages.close()
    pages = small(tmp_path, clock)
    pages.put(range(300, 320))
    assert pages.exists(range(16)) == 16
    assert pages.exists([16]) == 0
    pages.close()


def test_readers_of_an_evicted_segment_miss(tmp_path):
    with open_pages(tmp_path) as reader:
        pages = small(tmp_path)
        pages.put(range(16))
        assert reader.got([0]) == [0]
        pages.put(range(100, 370))
        assert reader.got([0]) == []
        assert reader.store.counts.corrupt == 0
        pages.close()


def test_capacity_taken_up_by_others_is_an_error_and_goes_by(tmp_path):
    others = [small(tmp_path) for _ in range(16)]
    for number, other in enumerate(others):
        other.put([number])
    pages = small(tmp_path)
    with pytest.raises(StoreError, match="other processes are writing"):
        pages.put([100])
    assert pages.got(range(16)) == list(range(16))
    for other in others:
        other.close()
    assert pages.put([100]) == 1
    pages.close()
