"""What the gateway counts over all its instances, while they come, go and come back."""

from __future__ import annotations

import asyncio

import msgspec
from support.gateways import started
from support.scripted_instance import HELLO, TaskInstance, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.gateway import Gateway
from kllm.cluster.launchers.launcher import VisitingLauncher
from kllm.messages import EngineLoad

ONE = msgspec.structs.replace(HELLO, incarnation="one")
OTHER = msgspec.structs.replace(HELLO, incarnation="other")


class Visited(TaskLauncher, VisitingLauncher):
    """Whoever is there counts on where it was, as a process does that outlives connections to it."""

    address = "tcp://10.0.0.5:7001"

    async def launch(self) -> TaskInstance:
        instance = await super().launch()
        self.say = self.scripts[-1].link.send
        return instance


def report(queries: int) -> EngineLoad:
    return EngineLoad(prefix_queries=queries, sequence=10_000 + queries)


async def queries(gateway: Gateway, launcher: Visited, count: int) -> int:
    """After a report of so many: of all."""
    launcher.say(report(count))
    await asyncio.sleep(0.1)
    return gateway.totals.prefix_queries


def test_one_that_is_taken_out_and_put_back_is_counted_once() -> None:
    async def main() -> None:
        one, other = Visited(hello=ONE), Visited(hello=OTHER)
        async with started(one, other) as gateway:
            await asyncio.sleep(1)
            assert await queries(gateway, one, 1000) == 1000
            assert await queries(gateway, other, 500) == 1500
            await gateway.remove_instance(0)
            await gateway.remove_instance(1)
            assert gateway.totals.prefix_queries == 1500
            back = Visited(hello=OTHER)  # in the place that the first one had
            back.faults.silent = True
            gateway.add_instance(back)
            await asyncio.sleep(1)
            assert gateway.slots[0].ready
            assert gateway.totals.prefix_queries == 1500, "nothing was heard of it yet"
            assert await queries(gateway, back, 600) == 1600
            back.instances[-1].kill()
            await asyncio.sleep(0.05)
            assert gateway.totals.prefix_queries == 1600
            await gateway.remove_instance(0)
            assert gateway.totals.prefix_queries == 1600
            again = Visited(hello=ONE)
            gateway.add_instance(again)
            await asyncio.sleep(1)
            assert await queries(gateway, again, 1100) == 1700
            another = Visited(hello=msgspec.structs.replace(HELLO, incarnation="another"))
            gateway.add_instance(another)
            await asyncio.sleep(1)
            assert await queries(gateway, another, 7) == 1707

    run(main())


def test_what_a_slot_has_counted_is_not_lost_with_it() -> None:
    async def main() -> None:
        launchers = [TaskLauncher(), TaskLauncher()]
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            launchers[0].faults.failing = True
            for i in range(20):
                async for _ in gateway.generate(make_request(str(i))):
                    pass
            launchers[0].instances[-1].kill()
            await asyncio.sleep(1)
            before = gateway.trips, gateway.restarts
            assert before >= (1, 1)
            await gateway.remove_instance(0)
            gateway.add_instance(TaskLauncher())
            await asyncio.sleep(1)
            assert (gateway.trips, gateway.restarts) == before

    run(main())


def test_what_is_remembered_of_those_that_left_is_bounded() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            for i in range(300):
                visited = Visited(hello=msgspec.structs.replace(HELLO, incarnation=str(i)))
                visited.start_s = 0.0
                slot = gateway.add_instance(visited)
                await asyncio.sleep(0.1)
                visited.say(report(1))
                await asyncio.sleep(0.1)
                await gateway.remove_instance(slot.index)
            assert gateway.totals.prefix_queries == 300
            assert len(gateway._instances._last) <= 256

    run(main())
