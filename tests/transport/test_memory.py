from __future__ import annotations

import asyncio

import pytest
from support.virtual_time import run

from kllm.messages import Abort, Drain, Starting
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.memory import memory_pair


def test_messages_arrive_in_order_both_ways() -> None:
    async def main() -> None:
        gateway, instance = memory_pair()
        for i in range(5):
            gateway.send(Abort(request_ids=[str(i)]))
        assert [await instance.recv() for _ in range(5)] == [Abort(request_ids=[str(i)]) for i in range(5)]
        waiting = asyncio.create_task(gateway.recv())
        await asyncio.sleep(0)
        instance.send(Starting(phase="a"))
        assert await waiting == Starting(phase="a")

    run(main())


def test_a_full_link_refuses_and_loses_nothing() -> None:
    async def main() -> None:
        gateway, instance = memory_pair(capacity=2)
        gateway.send(Abort(request_ids=["a"]))
        gateway.send(Abort(request_ids=["b"]))
        with pytest.raises(Backpressure):
            gateway.send(Drain())
        assert await instance.recv() == Abort(request_ids=["a"])
        gateway.send(Drain())
        assert await instance.recv() == Abort(request_ids=["b"])
        assert await instance.recv() == Drain()

    run(main())


def test_what_was_sent_before_a_close_still_arrives() -> None:
    async def main() -> None:
        gateway, instance = memory_pair()
        instance.send(Starting(phase="last words"))
        instance.close()
        instance.close()
        with pytest.raises(LinkClosed):
            gateway.send(Drain())
        assert await gateway.recv() == Starting(phase="last words")
        with pytest.raises(LinkClosed):
            await gateway.recv()

    run(main())


@pytest.mark.parametrize("own_end", [True, False])
def test_a_close_wakes_a_waiting_recv(own_end: bool) -> None:
    async def main() -> None:
        gateway, instance = memory_pair()
        waiting = asyncio.create_task(gateway.recv())
        await asyncio.sleep(0)
        (gateway if own_end else instance).close()
        with pytest.raises(LinkClosed):
            await waiting

    run(main())


def test_a_cancelled_recv_loses_nothing() -> None:
    async def main() -> None:
        gateway, instance = memory_pair()
        waiting = asyncio.create_task(gateway.recv())
        await asyncio.sleep(0)
        instance.send(Starting(phase="a"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await gateway.recv() == Starting(phase="a")

    run(main())
