"""Links over the simulated network: delay, shared bandwidth, order, and what faults do to messages."""

from __future__ import annotations

import asyncio
import random

import pytest

from kllm.messages import Abort, Deltas, Message, Submit
from kllm.request import Delta, Request, SamplingParams
from kllm.simulation.fabric import Fabric, Weather
from kllm.simulation.loop import run
from kllm.simulation.node import Node
from kllm.transport.link import LinkClosed


def numbered(count: int) -> list[Abort]:
    return [Abort(request_ids=[f"{index}"]) for index in range(count)]


def number(message: Message) -> int:
    assert isinstance(message, Abort)
    return int(message.request_ids[0])


async def received_after(seconds: float, link: object) -> list[int]:
    got: list[int] = []

    async def read() -> None:
        while True:
            got.append(number(await link.recv()))  # type: ignore[attr-defined]

    reading = asyncio.create_task(read())
    await asyncio.sleep(seconds)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return got


def test_messages_take_time_and_keep_their_order() -> None:
    async def main() -> tuple[list[int], float]:
        near, far = Fabric(random.Random(1), Weather(latency_s=0.5, jitter_s=0.4)).connect(Node(-1, 1e9), Node(0, 1e9))
        for message in numbered(50):
            near.send(message)
        first = number(await far.recv())
        at = asyncio.get_running_loop().time()
        return [first, *await received_after(2.0, far)], at

    got, first_at = run(main())
    assert got == list(range(50))
    assert 0.5 <= first_at <= 0.9 + 1e-6


def test_what_a_node_sends_shares_its_bandwidth() -> None:
    request = Request(request_id="r", prompt_token_ids=[1] * 250_000, params=SamplingParams())

    async def main() -> list[float]:
        fabric = Fabric(random.Random(1), Weather(latency_s=0.0, jitter_s=0.0))
        gateway = Node(-1, 1e6)  # a megabyte a second
        links = [fabric.connect(gateway, Node(index, 1e12)) for index in range(3)]
        loop = asyncio.get_running_loop()
        times = []
        for near, _ in links:
            near.send(Submit(request=request))
        for _, far in links:
            await far.recv()
            times.append(loop.time())
        return times

    assert run(main()) == pytest.approx([1.0, 2.0, 3.0], rel=1e-3)


def test_rough_weather_loses_repeats_and_reorders() -> None:
    async def main() -> list[int]:
        weather = Weather(loss=0.2, duplicate=0.2, reorder=0.2, late_s=0.1)
        near, far = Fabric(random.Random(7), weather).connect(Node(-1, 1e9), Node(0, 1e9))
        for message in numbered(500):
            near.send(message)
            await asyncio.sleep(0.01)
        return await received_after(2.0, far)

    got = run(main())
    assert 350 < len(set(got)) < 450, "about a fifth is lost"
    assert len(got) > len(set(got)) + 40, "about a fifth is repeated"
    assert got != sorted(got)
    assert got == run(main()), "the same seed, the same weather"


def test_a_node_that_is_cut_off_hears_nothing_not_even_the_end() -> None:
    async def main() -> None:
        node = Node(0, 1e9)
        near, far = Fabric(random.Random(1), Weather()).connect(Node(-1, 1e9), node)
        node.cut_off()
        near.send(numbered(1)[0])
        near.close()
        assert await received_after(5.0, far) == []
        node.reconnect()
        assert await received_after(5.0, far) == [], "what was lost does not come later"
        with pytest.raises(LinkClosed):
            near.send(numbered(1)[0])

    run(main())


def test_a_frozen_node_sends_and_receives_when_it_thaws() -> None:
    async def main() -> tuple[list[int], list[int]]:
        node = Node(0, 1e9)
        near, far = Fabric(random.Random(1), Weather()).connect(Node(-1, 1e9), node)
        node.freeze()
        for message in numbered(3):
            near.send(message)
            far.send(Deltas(items=[Delta(request_id=message.request_ids[0])]))
        before = await received_after(5.0, far)
        node.thaw()
        after = await received_after(1.0, far)
        assert [(await near.recv()).items[0].request_id for _ in range(3)] == ["0", "1", "2"]  # type: ignore[union-attr]
        return before, after

    assert run(main()) == ([], [0, 1, 2])


def test_the_end_of_a_link_comes_after_what_was_sent() -> None:
    async def main() -> None:
        near, far = Fabric(random.Random(1), Weather()).connect(Node(-1, 1e9), Node(0, 1e9))
        for message in numbered(2):
            near.send(message)
        near.close()
        assert [number(await far.recv()) for _ in range(2)] == [0, 1]
        with pytest.raises(LinkClosed):
            await far.recv()
        await asyncio.sleep(1.0)
        with pytest.raises(LinkClosed):
            far.send(Deltas(items=[]))

    run(main())
