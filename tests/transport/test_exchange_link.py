"""ExchangeLink: a gateway that does not keep up holds up nobody else."""

from __future__ import annotations

import asyncio

import pytest
from support.memory_peers import MemoryPeers
from support.virtual_time import run

from kllm.messages import Abort, CacheDelta, Down, Drain, Hello, Leaving, Ping, Submit, WatchCache
from kllm.request import Request, SamplingParams
from kllm.transport.exchange_link import MOST_WAITING, ExchangeLink
from kllm.transport.link import LinkClosed
from kllm.transport.peers import PeerKey

HELLO = Hello(instance_id="i", incarnation="x")
SUBMIT = Submit(request=Request(request_id="r", prompt_token_ids=[1], params=SamplingParams()))


def test_a_slow_gateway_gets_everything_later() -> None:
    async def main() -> None:
        peers = MemoryPeers(capacity=4)
        link = ExchangeLink(peers)
        link.send(HELLO)
        slow, quick = peers.connect(), peers.connect()
        for gateway in (slow, quick):
            gateway.send(WatchCache())
        assert [await link.recv(), await link.recv()] == [WatchCache(), WatchCache()]
        assert [await gateway.recv() for gateway in (slow, quick)] == [HELLO, HELLO]
        for sequence in range(100):
            link.send(CacheDelta(sequence=sequence, changes=[]))
            assert await quick.recv() == CacheDelta(sequence=sequence, changes=[])
        for sequence in range(100):
            assert await slow.recv() == CacheDelta(sequence=sequence, changes=[])
        link.close()

    run(main())


def test_one_that_never_reads_counts_as_gone() -> None:
    async def main() -> None:
        peers = MemoryPeers(capacity=4)
        link = ExchangeLink(peers)
        stuck = peers.connect()
        for message in (SUBMIT, WatchCache()):
            stuck.send(message)
        named = await link.recv()
        assert isinstance(named, Submit)
        assert await link.recv() == WatchCache()
        for sequence in range(MOST_WAITING + 6):
            link.send(CacheDelta(sequence=sequence, changes=[]))
        assert link.exchange.gateways == 0
        assert await link.recv() == Abort(request_ids=[named.request.request_id])
        link.close()

    run(main())


def test_one_whose_connection_ends_is_noticed_with_the_next_message() -> None:
    async def main() -> None:
        peers = MemoryPeers()
        link = ExchangeLink(peers)
        gateway = peers.connect()
        gateway.send(SUBMIT)
        named = await link.recv()
        assert isinstance(named, Submit)
        gateway.close()
        link.send(HELLO)
        assert await link.recv() == Abort(request_ids=[named.request.request_id])
        link.close()

    run(main())


def test_an_instance_that_can_hear_nobody_any_more_is_told() -> None:
    class Faulty(MemoryPeers):
        async def recv(self) -> tuple[PeerKey, Down]:
            raise RuntimeError("a fault")

    async def main() -> None:
        link = ExchangeLink(Faulty())
        with pytest.raises(LinkClosed):
            await link.recv()
        with pytest.raises(RuntimeError, match="a fault"):
            await link._listening
        link.close()

    run(main())


def test_drain_tells_both_sides_and_close_ends_everything() -> None:
    async def main() -> None:
        peers = MemoryPeers()
        link = ExchangeLink(peers)
        gateway = peers.connect()
        gateway.send(Ping())
        while link.exchange.gateways == 0:  # noqa: ASYNC110 - nothing is said when somebody joins a start
            await asyncio.sleep(0)
        link.drain()
        assert await link.recv() == Drain()
        assert await gateway.recv() == Leaving()
        waiting = asyncio.ensure_future(link.recv())
        await asyncio.sleep(0)
        link.close()
        link.close()
        for end in (waiting, gateway.recv()):
            with pytest.raises(LinkClosed):
                await end
        with pytest.raises(LinkClosed):
            link.send(HELLO)
        await asyncio.sleep(0)

    run(main())
