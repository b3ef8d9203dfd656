"""DiskStore as the tiers use it."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.disk_stores import PAGE, Pages, flip_bit, key, open_pages, page, segment_bytes, segments

from kllm.cache.stores.disk import DiskStore
from kllm.cache.stores.segment import HEADER_BYTES
from kllm.cache.stores.store import StoreError

RECORD = HEADER_BYTES + PAGE


# -- contents ----------------------------------------------------------------------------------------------------


def test_pages_come_back_as_they_were_put(tmp_path):
    with open_pages(tmp_path / "store") as pages:
        assert pages.put(range(10)) == 10
        assert pages.got(range(10)) == list(range(10))
        counts = pages.store.counts
        assert (counts.bytes_written, counts.bytes_read, counts.corrupt) == (10 * PAGE, 10 * PAGE, 0)


def test_nothing_is_asked_or_given(tmp_path):
    with open_pages(tmp_path) as pages:
        assert pages.put([]) == 0
        assert pages.got([]) == []
        assert pages.exists([]) == 0
        assert pages.exists([1]) == 0


def test_many_pages_in_one_call(tmp_path):
    """More than one vectored call writes, and more than one piece of work reads."""
    with open_pages(tmp_path, size=512) as pages:
        assert pages.put(range(3000)) == 3000
        assert len(pages.got(range(3000))) == 3000
        assert pages.exists(range(3001)) == 3000


def test_pages_in_any_order_some_of_them_absent(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put(range(0, 40, 2))
        asked = random.Random(1).sample(range(40), 40)
        assert sorted(pages.got(asked)) == list(range(0, 40, 2))


def test_exists_counts_the_leading_ones(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put([0, 1, 2, 4])
        assert pages.exists(range(6)) == 3
        assert pages.exists([7, 0, 1]) == 0


def test_pages_that_are_there_are_not_written_again(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put([1, 2])
        assert pages.put([1, 2, 3, 3]) == 1
        assert segment_bytes(tmp_path) == 3 * RECORD


def test_a_page_asked_for_twice_is_given_twice(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put([1])
        assert pages.got([1, 1, 2]) == [1, 1]


def test_pages_survive_a_restart_with_and_without_closing(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put(range(5))
    with open_pages(tmp_path) as pages:
        assert pages.got(range(5)) == list(range(5))
        pages.put([5])
    with open_pages(tmp_path) as pages:
        assert pages.exists(range(7)) == 6


def test_page_sizes_share_a_folder(tmp_path):
    with open_pages(tmp_path) as small, open_pages(tmp_path, size=10_000) as large:
        small.put([1, 2])
        large.put([3])
        assert small.got([1, 2]) == [1, 2]
        assert large.got([3]) == [3]
        assert small.got([3]) == []  # of another size: nothing of it is read
        assert small.store.counts.corrupt == 0


def test_clear_forgets_everything_and_the_store_goes_on(tmp_path):
    with open_pages(tmp_path) as pages, open_pages(tmp_path) as other:
        pages.put(range(5))
        other.put([7])
        pages.run(pages.store.clear())
        assert pages.got([0, 1, 7]) == []
        other.put([8])
        pages.put([1])
        assert other.got([1, 7, 8]) == [1, 8]


def test_files_are_for_their_owner_only(tmp_path):
    folder = tmp_path / "a" / "store"
    with open_pages(folder) as pages:
        pages.put([1])
        for path in (folder, *folder.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_wrong_calls_are_refused(tmp_path):
    with open_pages(tmp_path) as pages:
        with pytest.raises(ValueError, match="2 keys for 1 pages"):
            pages.run(pages.store.put([key(1), key(2)], [memoryview(page(1))]))
        with pytest.raises(ValueError, match=r"a page is 4096 bytes in one piece, not 5"):
            pages.run(pages.store.get([key(1)], [memoryview(bytearray(5))]))
        with pytest.raises(ValueError, match="1 to 64 bytes, not 65"):
            pages.run(pages.store.put([bytes(65)], [memoryview(page(1))]))
    with pytest.raises(StoreError, match="closed"):
        asyncio.run(pages.store.exists([key(1)]))
    asyncio.run(pages.store.close())  # again


def test_a_capacity_below_two_pages_is_refused(tmp_path):
    with pytest.raises(StoreError, match="too small for pages of 4,096"):
        DiskStore(tmp_path, PAGE, 5000)


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 20, 30, HEADER_BYTES, HEADER_BYTES + PAGE - 1])
def test_a_flipped_bit_is_counted_and_never_served(tmp_path, offset):
    with open_pages(tmp_path) as pages:
        pages.put(range(4))
        flip_bit(segments(tmp_path)[0], 2 * RECORD + offset)
        assert pages.got(range(4)) == [0, 1, 3]
        assert pages.store.counts.corrupt == 1
        assert pages.exists(range(4)) == 2
        assert pages.put([2]) == 1
        assert pages.got(range(4)) == [0, 1, 2, 3]
        assert pages.store.counts.corrupt == 1


def test_a_truncated_segment_loses_its_tail_only(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put(range(6))
    os.truncate(segments(tmp_path)[0], 4 * RECORD - 1)
    with open_pages(tmp_path) as pages:
        assert pages.got(range(6)) == [0, 1, 2]
        assert pages.store.counts.corrupt == 3
        assert pages.exists(range(6)) == 3


def test_a_missing_segment_is_a_loss_of_its_pages(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put(range(3))
        segments(tmp_path)[0].unlink()
        assert pages.got([0, 1]) == []
        assert pages.store.counts.corrupt == 2
        assert pages.put([0]) == 1
    with open_pages(tmp_path) as pages:
        assert pages.exists([2]) == 0


def test_a_page_in_the_place_of_another_is_not_served(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put(range(2))
        path = segments(tmp_path)[0]
        content = path.read_bytes()
        path.write_bytes(content[RECORD:] + content[:RECORD])
        assert pages.got([0, 1]) == []


# -- calls that nobody waits for any more ------------------------------------------------------------------------


def test_idle_waits_for_calls_that_were_given_up(tmp_path, monkeypatch):
    """The memory of a cancelled get is used until the read is over, and not after idle() returned."""
    entered, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        entered.set()
        assert go_on.wait(10)
        return real(fd, buffers, offset)

    async def scenario(store: DiskStore) -> None:
        memory = bytearray(PAGE)
        call = asyncio.ensure_future(store.get([key(1)], [memoryview(memory)]))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        waiting = asyncio.ensure_future(store.idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert memory == bytes(PAGE)
        go_on.set()
        await waiting
        assert memory == page(1)

    with open_pages(tmp_path) as pages:
        pages.put([1])
        monkeypatch.setattr(os, "preadv", slow)
        pages.run(scenario(pages.store))


def test_reads_do_not_wait_for_writes(tmp_path, monkeypatch):
    go_on = threading.Event()
    real = os.fdatasync

    def slow(fd: int) -> None:
        assert go_on.wait(10)
        real(fd)

    async def scenario(store: DiskStore) -> None:
        writing = asyncio.ensure_future(store.put([key(2)], [memoryview(page(2))]))
        memory = bytearray(PAGE)
        assert await store.exists([key(1)]) == 1
        assert await store.get([key(1)], [memoryview(memory)]) == [True]
        assert not writing.done()
        go_on.set()
        assert await writing == 1

    with open_pages(tmp_path) as pages:
        pages.put([1])
        monkeypatch.setattr(os, "fdatasync", slow)
        pages.run(scenario(pages.store))


def test_a_put_that_was_given_up_stops_at_the_next_batch(tmp_path, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        entered.set()
        assert go_on.wait(10)
        return real(fd, buffers, offset)

    size = 1 << 20
    content = memoryview(page(1, size))

    async def scenario(store: DiskStore) -> None:
        keys = [key(number) for number in range(12)]
        call = asyncio.ensure_future(store.put(keys, [content] * 12))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait)
        call.cancel()
        await asyncio.wait([call])
        go_on.set()
        await store.idle()

    with open_pages(tmp_path, 1 << 30, size=size) as pages:
        monkeypatch.setattr(os, "pwritev", slow)
        pages.run(scenario(pages.store))
    assert segment_bytes(tmp_path) == 4 * (HEADER_BYTES + size)  # the batch that was being written
    with open_pages(tmp_path, 1 << 30, size=size) as pages:
        assert pages.exists(range(12)) == 4


# -- against a dictionary ----------------------------------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 40), max_size=12)


class Model(RuleBasedStateMachine):
    """Any order of calls, restarts and damage, by two stores of one folder."""

    folder: Path
    made = 0

    @initialize()
    def begin(self) -> None:
        Model.made += 1
        self.place = self.folder / str(Model.made)
        self.kept: dict[int, bool] = {}  # whether its bytes are intact
        self.stores = [self.opened(), self.opened()]

    def opened(self) -> Pages:
        return Pages(self.place, segment_bytes=5 * RECORD)

    def teardown(self) -> None:
        for pages in getattr(self, "stores", []):
            pages.close()

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def put(self, which: int, numbers: list[int]) -> None:
        new = {number for number in numbers if number not in self.kept}
        assert self.stores[which].put(numbers) == len(new)
        self.kept.update(dict.fromkeys(new, True))

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def get(self, which: int, numbers: list[int]) -> None:
        assert self.stores[which].got(numbers) == [number for number in numbers if self.kept.get(number)]
        for number in numbers:
            if self.kept.get(number) is False:
                del self.kept[number]

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def exists(self, which: int, numbers: list[int]) -> None:
        leading = next((i for i, number in enumerate(numbers) if number not in self.kept), len(numbers))
        assert self.stores[which].exists(numbers) == leading

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([number for number, intact in self.kept.items() if intact]))
        content = page(number)
        for path in segments(self.place):
            where = path.read_bytes().find(content)
            if where >= 0:
                flip_bit(path, where + data.draw(st.integers(0, PAGE - 1)))
        self.kept[number] = False

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.opened()

    @rule()
    def clear(self) -> None:
        self.stores[0].run(self.stores[0].store.clear())
        self.kept.clear()


def test_any_order_of_calls_agrees_with_a_dictionary(tmp_path):
    Model.folder = tmp_path
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = settings(max_examples=25, stateful_step_count=14, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(Model, settings=limits)
