"""Random histories of a fleet: hosts die and come back, networks go away, gateways die and start again."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateways import assert_complete, read
from support.memory_fleet import Host, Visitor
from support.scripted_instance import make_request
from support.virtual_time import run

from kllm.cluster.gateway import Gateway, RequestStream
from kllm.request import Delta

HOSTS, GATEWAYS, EVENTS = 3, 2, 25
FORGIVING = {"silence_limit": 4.0, "max_attempts": 1000, "max_outage": 1e9}


class Member:
    """One gateway process after the other, with clients that never stop asking. strong: it never dies."""

    def __init__(self, hosts: list[Host], rng: random.Random) -> None:
        self.hosts = hosts
        self.rng = rng
        self.asked = 0
        self.work: list[tuple[RequestStream, asyncio.Task[list[Delta]]]] = []

    async def start(self) -> None:
        self.visitors = [Visitor(host) for host in self.hosts]
        self.gateway = Gateway(self.visitors, rng=random.Random(self.rng.random()), **FORGIVING)  # type: ignore[arg-type]
        await self.gateway.start()

    def ask(self) -> None:
        self.asked += 1
        request = make_request(f"r{self.asked % 40}-{self.asked}", max_tokens=self.rng.randint(1, 120), ignore_eos=True)
        stream = self.gateway.generate(request)
        self.work.append((stream, asyncio.ensure_future(read(stream))))

    async def die(self) -> None:
        for visitor in self.visitors:
            visitor.hang_up()
        await self.gateway.close()
        await asyncio.gather(*(reading for _, reading in self.work))
        self.work = []

    async def finish(self) -> None:
        for stream, reading in self.work:
            assert_complete(stream, await reading)
        self.gateway.check()
        await self.die()


async def history(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [Host(f"host-{index}", lease_reports=rng.choice((2, 6, 30))) for index in range(HOSTS)]
    for host in hosts:
        host.start()
    members = [Member(hosts, rng) for _ in range(GATEWAYS)]
    for member in members:
        await member.start()
    for _ in range(EVENTS):
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        for member in members:
            for _ in range(rng.randint(0, 3)):
                member.ask()
        host, member = rng.choice(hosts[1:]), rng.choice(members)  # the first host stays: somebody has to do the work
        visitor = member.visitors[hosts.index(host)]
        match rng.randrange(6):
            case 0:
                await host.kill()
            case 1 if host.peers is None:
                host.start(start_s=rng.choice((0.0, 1.0)))
            case 2:
                visitor.weather.cut = not visitor.weather.cut
            case 3 if host.peers is not None and not host.faults.stuck:
                host.link.drain()
                await host.ended()
            case 4:
                host.faults.stuck = not host.faults.stuck
            case 5 if member is members[0]:
                await member.die()
                await member.start()
    for member in members:
        await member.finish()
    await asyncio.sleep(40)  # longer than any lease
    for host in hosts:
        assert host.peers is None or not host.script.running, "an instance works for a gateway that is gone"
        await host.kill()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_happens_each_request_ends_once_and_whole(seed: int) -> None:
    run(history(seed))
