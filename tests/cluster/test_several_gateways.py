"""Several gateways over the same instances, which outlive them: in virtual time, with deaths and partitions."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from support.gateways import assert_complete, read
from support.memory_fleet import Host, Visitor
from support.scripted_instance import HELLO, make_request
from support.virtual_time import run

from kllm.cluster.gateway import Gateway, RequestStream
from kllm.messages import Hello
from kllm.request import Delta

LONG = {"max_tokens": 150, "ignore_eos": True}  # a second and more


def make_gateway(*visitors: Visitor, seed: int = 0, **options: object) -> Gateway:
    return Gateway(visitors, rng=random.Random(seed), **options)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def fleet(hosts: int = 2, **options: int) -> AsyncIterator[list[Host]]:
    """Hosts with ready instances; afterwards nothing may be left running."""
    made = [Host(f"host-{index}", **options) for index in range(hosts)]  # type: ignore[arg-type]
    for host in made:
        host.start()
    try:
        yield made
    finally:
        for host in made:
            await host.kill()


async def hang_up(gateway: Gateway, *visitors: Visitor) -> None:
    """kill -9 of a gateway's process."""
    for visitor in visitors:
        visitor.hang_up()
    await gateway.close()


def generate(gateway: Gateway, *request_ids: str) -> list[tuple[RequestStream, asyncio.Task[list[Delta]]]]:
    streams = [gateway.generate(make_request(request_id, **LONG)) for request_id in request_ids]
    return [(stream, asyncio.ensure_future(read(stream))) for stream in streams]


def test_two_gateways_use_the_same_ids_at_once() -> None:
    async def main() -> None:
        async with fleet() as hosts:
            gateways = [make_gateway(*map(Visitor, hosts), seed=seed) for seed in range(2)]
            for gateway in gateways:
                await gateway.start()
            await asyncio.sleep(1)
            work = [entry for gateway in gateways for entry in generate(gateway, *(f"r{i}" for i in range(12)))]
            for stream, reading in work:
                assert_complete(stream, await reading)
            assert {stream.request.params.seed for stream, _ in work} != {None}
            for gateway in gateways:
                gateway.check()
                await gateway.close()
            await asyncio.sleep(2)
            assert [host.link.exchange.gateways for host in hosts] == [0, 0]

    run(main())


def test_a_gateway_dies_and_the_other_goes_on() -> None:
    async def main() -> None:
        async with fleet() as hosts:
            visitors = [[Visitor(host) for host in hosts] for _ in range(2)]
            dying, other = (make_gateway(*each, seed=seed) for seed, each in enumerate(visitors))
            await asyncio.gather(dying.start(), other.start())
            await asyncio.sleep(1)
            lost = generate(dying, *(f"r{i}" for i in range(8)))
            work = generate(other, *(f"r{i}" for i in range(8)))
            await asyncio.sleep(0.2)
            assert sum(len(host.script.running) for host in hosts) == 16
            await hang_up(dying, *visitors[0])
            await asyncio.sleep(1.1)  # the next report
            assert sum(len(host.script.running) for host in hosts) == other.in_flight
            for stream, reading in work:
                assert_complete(stream, await reading)
                assert stream.attempts == 1
            await asyncio.gather(*(reading for _, reading in lost))
            again = make_gateway(*(Visitor(host) for host in hosts))
            await again.start()
            for stream, reading in generate(again, "r0", "r1"):
                assert_complete(stream, await reading)
            await again.close()
            await other.close()

    run(main())


def test_a_restarted_instance_is_another_incarnation() -> None:
    async def main() -> None:
        async with fleet(1) as (host,):
            gateway = make_gateway(Visitor(host))
            await gateway.start()
            work = generate(gateway, "a", "b")
            await asyncio.sleep(0.3)
            first = gateway.slots[0].incarnation
            await host.kill()
            host.start()
            for stream, reading in work:
                assert_complete(stream, await reading)
                assert stream.attempts == 2
            assert first == "host-0-1"
            assert gateway.slots[0].incarnation == "host-0-2"
            await gateway.close()

    run(main())


def test_a_partitioned_instance_that_comes_back_delivers_nothing_twice() -> None:
    """The gateway gives it up and goes elsewhere; what it did meanwhile is aborted there, and delivered nowhere."""

    async def main() -> None:
        async with fleet(lease_reports=8) as hosts:
            visitors = [Visitor(host) for host in hosts]
            gateway = make_gateway(*visitors, silence_limit=5.0)
            await gateway.start()
            await asyncio.sleep(1)
            work = generate(gateway, *(f"r{i}" for i in range(8)))
            await asyncio.sleep(0.1)
            hosts[0].faults.stuck = True  # it still has them when it is back
            visitors[0].weather.cut = True
            for stream, reading in work:
                assert_complete(stream, await reading)
            assert hosts[0].script.running
            assert gateway.slots[0].state == "absent"
            visitors[0].weather.cut = hosts[0].faults.stuck = False
            await asyncio.sleep(10)
            assert gateway.slots[0].ready
            assert not hosts[0].script.running
            for stream, reading in generate(gateway, *(f"r{i}" for i in range(8))):
                assert_complete(stream, await reading)
            steps = [slot.totals.steps for slot in gateway.slots]
            assert steps == [slot.load.steps for slot in gateway.slots], "one incarnation is counted once"
            gateway.check()
            visitors[0].hang_up()
            await gateway.close()

    run(main())


def test_a_gateway_whose_lease_is_over_submits_again() -> None:
    """The network was away for longer than the instance waits, and for less than the gateway does."""

    async def main() -> None:
        async with fleet(1, lease_reports=3) as (host,):
            visitor = Visitor(host)
            gateway = make_gateway(visitor, silence_limit=60.0)
            await gateway.start()
            work = generate(gateway, "a", "b")
            await asyncio.sleep(0.2)
            visitor.weather.cut = True
            await asyncio.sleep(6)
            assert host.link.exchange.gateways == 0
            assert not host.script.running
            visitor.weather.cut = False
            for stream, reading in work:
                assert_complete(stream, await reading)
                assert stream.attempts == 2
            gateway.check()
            await gateway.close()

    run(main())


def test_an_instance_that_is_not_there_is_waited_for_without_end() -> None:
    async def main() -> None:
        here, absent = Host("here"), Host("absent")
        here.start()
        gateway = make_gateway(Visitor(here), Visitor(absent), max_restarts=2)
        await gateway.start()
        await asyncio.sleep(200)
        assert gateway.healthy
        assert gateway.slots[1].state == "absent"
        assert gateway.slots[1].trouble == "nobody answers at absent"
        absent.start()
        await asyncio.sleep(6)
        assert gateway.slots[1].ready
        assert gateway.slots[1].trouble is None
        await gateway.close()
        for host in (here, absent):
            await host.kill()

    run(main())


def test_a_gateway_starts_before_its_instances() -> None:
    async def main() -> None:
        host = Host("host")
        gateway = make_gateway(Visitor(host), max_restarts=0)
        starting = asyncio.ensure_future(gateway.start())
        await asyncio.sleep(600)
        assert not starting.done()
        host.start(start_s=2.0)
        assert (await starting).incarnation == "host-1"
        await gateway.close()
        await host.kill()

    run(main())


def test_an_instance_that_leaves_finishes_what_it_has() -> None:
    async def main() -> None:
        async with fleet() as hosts:
            gateway = make_gateway(*map(Visitor, hosts))
            await gateway.start()
            await asyncio.sleep(1)
            work = generate(gateway, *(f"r{i}" for i in range(6)))
            await asyncio.sleep(0.1)
            hosts[0].link.drain()
            await asyncio.sleep(0.05)
            assert gateway.slots[0].state == "leaving"
            there = len(hosts[0].script.submits)
            assert there
            more = generate(gateway, *(f"s{i}" for i in range(6)))
            await hosts[0].ended()
            assert len(hosts[0].script.submits) == there
            for stream, reading in work + more:
                assert_complete(stream, await reading)
                assert stream.attempts == 1
            await gateway.close()

    run(main())


def test_instances_join_and_leave() -> None:
    async def main() -> None:
        async with fleet(3) as hosts:
            gateway = make_gateway(Visitor(hosts[0]))
            await gateway.start()
            slot = gateway.add_instance(Visitor(hosts[1]))
            await asyncio.sleep(1)
            assert slot.ready
            work = generate(gateway, *(f"r{i}" for i in range(6)))
            await asyncio.sleep(0.1)
            assert hosts[0].script.running
            await gateway.remove_instance(0, timeout=60.0)
            assert not hosts[0].script.running
            assert gateway.slots[0].state == "left"
            assert gateway.add_instance(Visitor(hosts[2])).index == 0, "its place is taken again"
            await asyncio.sleep(1)
            for stream, reading in work + generate(gateway, "s", "t", "u"):
                assert_complete(stream, await reading)
                assert stream.attempts == 1
            with pytest.raises(KeyError):
                await gateway.remove_instance(7)
            await asyncio.sleep(2)
            assert [host.link.exchange.gateways for host in hosts] == [0, 1, 1]
            gateway.check()
            await gateway.close()

    run(main())


def test_what_does_not_end_in_time_goes_elsewhere() -> None:
    async def main() -> None:
        async with fleet() as hosts:
            gateway = make_gateway(*map(Visitor, hosts))
            await gateway.start()
            await asyncio.sleep(1)
            work = generate(gateway, *(f"r{i}" for i in range(6)))
            await asyncio.sleep(0.1)
            await gateway.remove_instance(0, timeout=0.1)
            for stream, reading in work:
                assert_complete(stream, await reading)
            assert {stream.attempts for stream, _ in work} == {1, 2}
            gateway.check()
            await gateway.close()

    run(main())


def test_an_instance_with_another_model_is_refused() -> None:
    async def main() -> None:
        here = Host("here")
        odd = Host("odd", Hello(instance_id="", incarnation="", model="other", vocab_size=7, max_model_len=200))
        here.start()
        gateway = make_gateway(Visitor(here))
        await gateway.start()
        odd.start()
        slot = gateway.add_instance(Visitor(odd))
        await asyncio.sleep(30)
        assert not slot.ready
        assert slot.trouble is not None
        assert slot.trouble.startswith("it serves another model (other, a vocabulary of 7 tokens) than instance 0")
        assert HELLO.vocab_size != 7
        await gateway.close()
        for host in (here, odd):
            await host.kill()

    run(main())
