"""No arrival is missed, whatever else is done with the socket meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from kllm.messages import Abort, EngineLoad, Message
from kllm.transport.link import Link
from kllm.transport.zeromq import dial, listen
from kllm.transport.zeromq_wait import ReadyToReceive

NUMBER = 400


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


@pytest.mark.parametrize("seed", range(4))
def test_both_ends_send_while_they_wait(runner: asyncio.Runner, tmp_path: Path, seed: int) -> None:
    """A send may take the sign of an arrival away: whoever waits must learn of it all the same."""

    async def main() -> None:
        gateway = listen(f"ipc://{tmp_path}/link")
        instance = dial(gateway.address)
        instance.send(EngineLoad(steps=0))
        assert (await gateway.recv()).steps == 0

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            up = [EngineLoad(steps=i) for i in range(NUMBER)]
            down = [Abort(request_ids=[str(i)]) for i in range(NUMBER)]
            group.create_task(_send(instance, up, random.Random(seed)))
            group.create_task(_send(gateway, down, random.Random(seed + 100)))
            loads = group.create_task(_received(gateway))
            aborts = group.create_task(_received(instance))
        assert [load.steps for load in loads.result()] == list(range(NUMBER))
        assert [int(abort.request_ids[0]) for abort in aborts.result()] == list(range(NUMBER))
        instance.close()
        gateway.close()

    with runner:
        runner.run(main())


async def _send(link: Link[Any, Any], messages: Sequence[Message], rng: random.Random) -> None:
    for message in messages:
        link.send(message)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)


async def _received(link: Link[Any, Any]) -> list[Any]:
    return [await link.recv() for _ in range(NUMBER)]


def test_messages_that_nobody_takes_cost_no_turns(runner: asyncio.Runner, tmp_path: Path) -> None:
    """The descriptor is readable until somebody asks: a loop that did not would spin."""

    async def main() -> None:
        context = zmq.Context()
        with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
            ours.bind(f"ipc://{tmp_path}/pair")
            theirs.connect(f"ipc://{tmp_path}/pair")
            ready = Counting(ours)
            theirs.send(b"x")
            async with asyncio.timeout(20):
                await ready.wait()
            calls = ready.calls
            await asyncio.sleep(0.05)
            assert ready.calls <= calls + 2
            assert ours.recv(zmq.NOBLOCK) == b"x"
            ready.close()
        context.term()

    with runner:
        runner.run(main())


class Counting(ReadyToReceive):
    calls = 0

    def _changed(self) -> None:
        self.calls += 1
        super()._changed()
