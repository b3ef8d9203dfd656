"""Pages between simulated instances: what a read takes, and what becomes of it when the owner does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kllm.cache.transfer.port import TransferError
from kllm.simulation.loop import run
from kllm.simulation.node import Node
from kllm.simulation.node_work import NodeWork
from kllm.simulation.page_mover import SimulatedPageMover
from kllm.simulation.transfer import TransferNetwork

PAGE, SPEED, LATENCY_S = 1000, 1e4, 0.5


class Machine:
    """A node with one process and eight slots; a page takes 100 ms to another."""

    def __init__(self, network: TransferNetwork, index: int) -> None:
        self.node = Node(index, 1e9)
        self.work = NodeWork(self.node)
        self.mover = SimulatedPageMover(self.node, self.work, PAGE, 1e9, 0.0, num_slots=8)
        self.transfer = network.join(self.node, self.work, self.mover, SPEED, LATENCY_S)

    def pages(self) -> list[bytes]:
        return [bytes(self.mover.page(slot)) for slot in range(8)]


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test gets an owner with something in its slots and two readers."""

    def wrapper() -> None:
        async def main() -> None:
            network = TransferNetwork()
            owner, one, two = (Machine(network, index) for index in range(3))
            await owner.mover.save(range(4), range(4))
            await test(owner, one, two)

        run(main())

    return wrapper


async def read(reader: Machine, owner: Machine, pages: int, timeout_s: float = 100.0) -> float:
    """When it ended."""
    await reader.transfer.read(owner.transfer.address, list(range(pages)), list(range(pages)), timeout_s)
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_reads_take_latency_and_share_the_owners_way(owner: Machine, one: Machine, two: Machine) -> None:
    began = asyncio.get_running_loop().time()
    ends = await asyncio.gather(read(one, owner, 4), read(two, owner, 4), read(one, two, 1))
    assert [end - began for end in ends] == pytest.approx([0.9, 1.3, 1.0])
    assert one.pages()[1:4] == two.pages()[1:4] == owner.pages()[1:4]
    assert len(set(owner.pages()[:4])) == 4, "every copy into a slot makes it another page"


@in_virtual_time
async def test_what_is_overwritten_meanwhile_arrives_as_something_else(
    owner: Machine, one: Machine, two: Machine
) -> None:
    before = owner.pages()
    reading = asyncio.ensure_future(read(one, owner, 4))
    await asyncio.sleep(0.1)
    await owner.mover.save([0], [2])
    await reading
    assert [a == b for a, b in zip(one.pages(), before, strict=True)][:4] == [True, True, False, True]


@in_virtual_time
async def test_an_owner_that_has_ended_refuses(owner: Machine, one: Machine, two: Machine) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    reading = asyncio.ensure_future(read(one, owner, 4))
    await asyncio.sleep(0.1)
    owner.work.end()
    with pytest.raises(TransferError, match="ended"):
        await reading
    assert loop.time() - began == pytest.approx(0.9)
    await owner.transfer.close()
    with pytest.raises(TransferError, match="ended"):
        await read(one, owner, 4)
    assert loop.time() - began == pytest.approx(0.9 + LATENCY_S)


@pytest.mark.parametrize("fault", ["freeze", "cut_off", "power_off"])
@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_an_owner_that_does_not_answer_costs_the_readers_patience(fault: str, after_s: float) -> None:
    @in_virtual_time
    async def check(owner: Machine, one: Machine, two: Machine) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(after_s, getattr(owner.node, fault))
        await asyncio.sleep(1e-3)
        with pytest.raises(TransferError, match="within"):
            await read(one, owner, 4, 3.0)
        assert loop.time() - began == pytest.approx(3.001)

    check()


@in_virtual_time
async def test_a_read_ends_with_its_time_and_with_its_reader(owner: Machine, one: Machine, two: Machine) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TransferError, match="within"):
        await read(one, owner, 4, 0.6)
    assert loop.time() - began == pytest.approx(0.6)
    reading = asyncio.ensure_future(read(two, owner, 4))
    await asyncio.sleep(0.1)
    two.work.end()
    with pytest.raises(TransferError, match="reader"):
        await reading
