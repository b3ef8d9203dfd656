"""What fleet.toml says while the gateway runs, over real sockets on this machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gateways import assert_complete, read
from support.scripted_instance import HELLO, Faults, ScriptedInstance, make_request

from kllm.cluster.fleet_config import FleetConfig
from kllm.cluster.gateway import Gateway
from kllm.cluster.membership import Membership, make_launcher
from kllm.messages import Role, SetRole
from kllm.transport.exchange_link import ExchangeLink
from kllm.transport.fleet_key import FleetKey, key_from
from kllm.transport.zeromq_peers import ZmqPeers


def fleet(*members: tuple[str, Role | None]) -> FleetConfig:
    instances = [{"address": address} | ({"role": role} if role else {}) for address, role in members]
    return FleetConfig.model_validate({"model": "m", "instance": instances})


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition belongs to others
        await asyncio.sleep(0.01)


def test_the_file_says_who_is_there(tmp_path: Path) -> None:
    a, b, c = (f"ipc://{tmp_path}/{name}" for name in "abc")

    async def main() -> None:
        scripts: dict[str, ScriptedInstance] = {}
        tasks = []
        for address in (a, b, c):
            scripts[address] = ScriptedInstance(ExchangeLink(ZmqPeers(address)), Faults(), HELLO)
            tasks.append(asyncio.create_task(scripts[address].main()))
        config = fleet((a, None), (b, "decode"))
        gateway = Gateway([make_launcher(entry, None) for entry in config.entries], rng=random.Random(0))
        membership = Membership(gateway, config)
        await gateway.start()
        await until(lambda: all(slot.ready for slot in gateway.slots))
        await until(lambda: SetRole(role="decode", term=1) in scripts[b].heard)
        assert not any(isinstance(message, SetRole) for message in scripts[a].heard)

        streams = [gateway.generate(make_request(f"r{i}", max_tokens=60, ignore_eos=True)) for i in range(6)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: bool(scripts[a].running))
        await membership.change(fleet((b, "decode"), (c, None)).entries, None)
        assert not scripts[a].running
        assert (gateway.slots[0].address, gateway.slots[0].state) == (a, "left")
        await until(lambda: gateway.slots[2].ready)
        assert gateway.slots[2].address == c
        for stream, task in zip(streams, reading, strict=True):
            assert_complete(stream, await task)
            assert stream.attempts == 1

        await membership.change(fleet((b, "decode"), (c, None), (a, None)).entries, None)
        await until(lambda: gateway.slots[0].ready)
        assert [slot.address for slot in gateway.slots] == [a, b, c]
        await gateway.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("told", ["before the instance restarts", "after it"])
def test_a_new_key_holds_for_those_that_stay(tmp_path: Path, told: str) -> None:
    address, keys = f"ipc://{tmp_path}/a", [key_from(digit * 32) for digit in (b"1", b"2")]

    def listen(key: FleetKey) -> asyncio.Task[None]:
        return asyncio.create_task(ScriptedInstance(ExchangeLink(ZmqPeers(address, key)), Faults(), HELLO).main())

    async def main() -> None:
        instance = listen(keys[0])
        config = fleet((address, None))
        gateway = Gateway([make_launcher(entry, keys[0]) for entry in config.entries], rng=random.Random(0))
        membership = Membership(gateway, config)
        await gateway.start()
        if told == "before the instance restarts":
            await membership.change(config.entries, keys[1])
            assert gateway.slots[0].ready, "the connection that there is stays"
        instance.cancel()
        await asyncio.gather(instance, return_exceptions=True)
        await until(lambda: not gateway.slots[0].ready)
        instance = listen(keys[1])
        if told == "after it":
            await membership.change(config.entries, keys[1])
        await until(lambda: gateway.slots[0].ready)
        assert len(gateway.slots) == 1
        await gateway.close()
        instance.cancel()
        await asyncio.gather(instance, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))
