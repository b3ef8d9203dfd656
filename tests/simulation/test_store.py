"""The store and the page mover of simulated instances: what their calls take, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kllm.cache.stores.store import StoreError
from kllm.simulation.loop import run
from kllm.simulation.node import Node
from kllm.simulation.node_work import NodeWork
from kllm.simulation.page_mover import SimulatedPageMover
from kllm.simulation.store import SimulatedStore, StoreHandle

PAGE = 1000
KEYS = [bytes([number]) for number in range(8)]
PAGES = [memoryview(b"")] * 8


class Machine:
    """A node with one process, and its ways to its memory (10 ms a page, 5 ms a copy) and to a store (100 ms a page,
    1 s a call)."""

    def __init__(self, store: SimulatedStore) -> None:
        self.node = Node(0, 1e9)
        self.work = NodeWork(self.node)
        self.mover = SimulatedPageMover(self.node, self.work, PAGE, bytes_per_s=1e5, latency_s=5e-3)
        self.store = StoreHandle(store, self.node, self.work, bytes_per_s=1e4, latency_s=1.0)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test gets a store of five pages and a machine that uses it."""

    def wrapper() -> None:
        async def main() -> None:
            store = SimulatedStore(PAGE, 5 * PAGE + 1)
            await test(store, Machine(store))

        run(main())

    return wrapper


async def timed(call: Awaitable[Any]) -> tuple[Any, float]:
    began = asyncio.get_running_loop().time()
    result = await call
    return result, pytest.approx(asyncio.get_running_loop().time() - began)


@in_virtual_time
async def test_calls_take_latency_and_bandwidth(store: SimulatedStore, one: Machine) -> None:
    assert await timed(one.store.put(KEYS[:4], PAGES[:4])) == (4, 1.4)
    assert await timed(one.store.put(KEYS[:5], PAGES[:5])) == (1, 1.1)
    assert await timed(one.store.exists(KEYS)) == (5, 1.0)
    assert await timed(one.store.get(KEYS[3:6], PAGES[3:6])) == ([True, True, False], 1.2)
    assert (one.store.counts.bytes_written, one.store.counts.bytes_read) == (5 * PAGE, 2 * PAGE)


@in_virtual_time
async def test_reads_and_writes_of_an_instance_share_its_way_and_others_have_theirs(
    store: SimulatedStore, one: Machine
) -> None:
    other = Machine(store)
    await other.store.put(KEYS[:2], PAGES[:2])
    calls = [
        one.store.put(KEYS[2:5], PAGES[2:5]),
        one.store.get(KEYS[:2], PAGES[:2]),
        other.store.get(KEYS[:2], PAGES[:2]),
    ]
    assert [took for _, took in await asyncio.gather(*map(timed, calls))] == [1.3, 1.5, 1.2]


@in_virtual_time
async def test_the_least_recently_used_goes_first_and_a_prefix_outlives_what_continues_it(
    store: SimulatedStore, one: Machine
) -> None:
    await one.store.put(KEYS[:5], PAGES[:5])
    assert await one.store.put(KEYS[5:6], PAGES[:1]) == 1
    assert one.store.counts.evicted == 1
    assert await one.store.get(KEYS[:6], PAGES[:6]) == [True, True, True, True, False, True]
    assert await one.store.exists(KEYS[:6]) == 4
    await one.store.clear()
    assert len(store) == 0


@in_virtual_time
async def test_a_store_that_is_full_slow_or_gone(store: SimulatedStore, one: Machine) -> None:
    await one.store.put(KEYS[:2], PAGES[:2])
    store.full = True
    with pytest.raises(StoreError, match="full"):
        await one.store.put(KEYS[:3], PAGES[:3])
    assert await one.store.put(KEYS[:2], PAGES[:2]) == 0
    store.full, store.slow = False, 100.0
    assert await timed(one.store.get(KEYS[:1], PAGES[:1])) == ([True], 110.0)
    store.slow = 1.0
    call = asyncio.ensure_future(one.store.get(KEYS[:1], PAGES[:1]))
    await asyncio.sleep(0.5)
    store.gone = True
    with pytest.raises(StoreError, match="gone"):
        await call
    for refused in (one.store.exists(KEYS), one.store.put(KEYS, PAGES), one.store.clear()):
        with pytest.raises(StoreError, match="gone"):
            await refused
    store.gone = False
    assert await one.store.exists(KEYS) == 2


@in_virtual_time
async def test_calls_of_a_machine_that_stands_still_or_is_cut_off_end_later(
    store: SimulatedStore, one: Machine
) -> None:
    loop = asyncio.get_running_loop()
    for stop, go in ((one.node.freeze, one.node.thaw), (one.node.cut_off, one.node.reconnect)):
        loop.call_later(0.5, stop)
        loop.call_later(30.0, go)
        _, took = await timed(one.store.exists(KEYS))
        assert 30.0 <= took.expected < 30.3


@in_virtual_time
async def test_calls_end_with_their_process_and_a_page_on_its_way_is_lost(store: SimulatedStore, one: Machine) -> None:
    calls = [one.store.put(KEYS[:2], PAGES[:2]), one.store.exists(KEYS)]
    asyncio.get_running_loop().call_later(0.25, one.work.end)
    results, took = await timed(asyncio.gather(*calls, one.mover.save([0], [0]), return_exceptions=True))
    assert [isinstance(result, StoreError) for result in results] == [True, True, False]
    assert took == 0.25
    assert len(store) == 0
    assert await timed(one.mover.load([0] * 1000, [0] * 1000)) == (None, 0.0)
    with pytest.raises(StoreError, match="ended"):
        await one.store.exists(KEYS)


@in_virtual_time
async def test_one_copy_at_a_time(store: SimulatedStore, one: Machine) -> None:
    assert len(one.mover.page(3)) == 0
    copies = [timed(one.mover.save([0, 1], [0, 1])), timed(one.mover.load([1], [2]))]
    assert [took for _, took in await asyncio.gather(*copies)] == [0.025, 0.04]
    call = asyncio.ensure_future(one.mover.load([0] * 10, [0] * 10))
    await asyncio.sleep(0)
    call.cancel()
    assert await timed(one.mover.idle()) == (None, 0.105)
