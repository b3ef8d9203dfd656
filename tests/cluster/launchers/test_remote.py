"""Instances that listen, and gateways that dial them, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.gateways import assert_complete, read
from support.scripted_instance import HELLO, Faults, ScriptedInstance, make_request

from kllm.cluster.gateway import Gateway
from kllm.cluster.launchers.launcher import LaunchError
from kllm.cluster.launchers.remote import RemoteLauncher
from kllm.transport.addresses import AddressError
from kllm.transport.exchange_link import ExchangeLink
from kllm.transport.fleet_key import FleetKey, key_from
from kllm.transport.zeromq_peers import ZmqPeers

Run = Callable[[Coroutine[Any, Any, None]], None]
KEY = key_from(b"1" * 32)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_main(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 60))

    return run_main


class Listening:
    """A scripted instance that listens."""

    def __init__(self, address: str, key: FleetKey | None = None) -> None:
        peers = ZmqPeers(address, key)
        self.address = peers.address
        self.link = ExchangeLink(peers)
        self.script = ScriptedInstance(self.link, Faults(), HELLO)
        self.task = asyncio.create_task(self.script.main())

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition belongs to others
        await asyncio.sleep(0.01)


def make_gateway(*launchers: RemoteLauncher, seed: int = 0) -> Gateway:
    return Gateway(launchers, rng=random.Random(seed))


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "locked"])
def test_two_gateways_over_two_instances(run: Run, tmp_path: Path, key: FleetKey | None) -> None:
    async def main() -> None:
        instances = [Listening("tcp://127.0.0.1:*", key), Listening(f"ipc://{tmp_path}/link", key)]
        gateways = [
            make_gateway(*(RemoteLauncher(instance.address, key) for instance in instances), seed=seed)
            for seed in range(2)
        ]
        for gateway in gateways:
            await gateway.start()
            await until(lambda gateway=gateway: all(slot.ready for slot in gateway.slots))  # type: ignore[misc]
        streams = [
            gateway.generate(make_request(f"r{i}", max_tokens=40, ignore_eos=True))
            for gateway in gateways
            for i in range(8)
        ]
        for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
            assert_complete(stream, deltas)
            assert stream.attempts == 1
        assert all(instance.script.submits for instance in instances)
        for gateway in gateways:
            await gateway.drain(5)
        await until(lambda: all(instance.link.exchange.gateways == 0 for instance in instances))
        assert not any(instance.task.done() for instance in instances), "a gateway that leaves ends no instance"
        for instance in instances:
            await instance.kill()

    run(main())


def test_an_instance_that_is_restarted_at_its_address(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/link"
        first = Listening(address)
        gateway = make_gateway(RemoteLauncher(address))
        await gateway.start()
        stream = gateway.generate(make_request("r", max_tokens=150, ignore_eos=True))
        reading = asyncio.create_task(read(stream))
        await until(lambda: len(stream.outputs) > 20)
        await first.kill()
        second = Listening(address)
        assert_complete(stream, await reading)
        assert stream.attempts == 2
        assert second.script.submits[0].outputs == stream.outputs[: len(second.script.submits[0].outputs)]
        await gateway.close()
        await second.kill()

    run(main())


def test_an_instance_that_leaves_loses_nothing(run: Run, tmp_path: Path) -> None:
    """Its last words arrive although it closes right after them."""

    async def main() -> None:
        address = f"ipc://{tmp_path}/link"
        instance = Listening(address)
        gateway = make_gateway(RemoteLauncher(address))
        await gateway.start()
        stream = gateway.generate(make_request("r", max_tokens=100, ignore_eos=True))
        reading = asyncio.create_task(read(stream))
        await until(lambda: len(stream.outputs) > 5)
        instance.link.drain()
        assert_complete(stream, await reading)
        assert stream.attempts == 1
        await instance.task
        await until(lambda: gateway.slots[0].state == "absent")
        await gateway.close()

    run(main())


def test_nobody_there(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        launcher = RemoteLauncher(f"ipc://{tmp_path}/link")
        try:
            instance = await launcher.launch()
        except LaunchError as error:
            assert "no instance answers" in str(error)  # noqa: PT017 - it depends on who is quicker
            return
        assert "no instance answers at" in await instance.wait()
        await instance.stop(1.0)

    run(main())


def test_addresses_that_are_refused() -> None:
    with pytest.raises(AddressError, match="is not an address"):
        RemoteLauncher("nowhere")
    with pytest.raises(AddressError, match="give a key file"):
        RemoteLauncher("tcp://10.0.0.1:7001")
    assert RemoteLauncher("10.0.0.1:7001", KEY).address == "tcp://10.0.0.1:7001"
