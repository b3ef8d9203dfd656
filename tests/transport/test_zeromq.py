from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from kllm.messages import Abort, Drain, EngineLoad, Starting, Submit
from kllm.request import Request, SamplingParams
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.zeromq import dial, listen

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_main(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 20))

    return run_main


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link" if request.param == "ipc" else "tcp://127.0.0.1:*"


def test_messages_arrive_in_order_both_ways(run: Run, address: str) -> None:
    submit = Submit(
        request=Request(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(seed=7)), outputs=[5], attempt=2
    )

    async def main() -> None:
        gateway = listen(address)
        instance = dial(gateway.address)
        for i in range(300):
            instance.send(EngineLoad(steps=i))
        assert [(await gateway.recv()).steps for _ in range(300)] == list(range(300))
        gateway.send(submit)
        gateway.send(Drain())
        assert await instance.recv() == submit
        assert await instance.recv() == Drain()
        instance.close()
        gateway.close()

    run(main())


def test_a_graceful_close_delivers_the_last_words(run: Run, address: str) -> None:
    async def main() -> None:
        gateway = listen(address)
        instance = dial(gateway.address)
        for i in range(100):
            instance.send(Starting(phase=str(i)))
        instance.close()
        assert [(await gateway.recv()).phase for _ in range(100)] == [str(i) for i in range(100)]
        with pytest.raises(LinkClosed):
            await gateway.recv()
        with pytest.raises(LinkClosed):
            gateway.send(Drain())
        gateway.close()

    run(main())


def test_closing_wakes_both_ends(run: Run, address: str) -> None:
    async def main() -> None:
        gateway = listen(address)
        instance = dial(gateway.address)
        instance.send(Starting(phase="up"))
        await gateway.recv()
        own, other = asyncio.create_task(gateway.recv()), asyncio.create_task(instance.recv())
        await asyncio.sleep(0)
        gateway.close()
        gateway.close()
        for task in (own, other):
            with pytest.raises(LinkClosed):
                await task
        instance.close()

    run(main())


def test_a_killed_peer_ends_the_link(run: Run, address: str) -> None:
    script = (
        "import asyncio, sys\n"
        "from kllm.messages import Starting\n"
        "from kllm.transport.zeromq import dial\n"
        "async def main():\n"
        "    link = dial(sys.argv[1])\n"
        "    link.send(Starting(phase='up'))\n"
        "    await link.recv()\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        gateway = listen(address)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, gateway.address)
        assert await gateway.recv() == Starting(phase="up")
        waiting = asyncio.create_task(gateway.recv())
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LinkClosed):
            await waiting
        await process.wait()
        gateway.close()

    run(main())


def test_a_cancelled_recv_loses_nothing(run: Run, address: str) -> None:
    async def main() -> None:
        gateway = listen(address)
        instance = dial(gateway.address)
        received = []
        for i in range(20):
            waiting = asyncio.create_task(gateway.recv())
            await asyncio.sleep(0)
            waiting.cancel()
            received += await asyncio.gather(waiting, return_exceptions=True)
            instance.send(EngineLoad(steps=i))
        received = [message.steps for message in received if isinstance(message, EngineLoad)]
        while len(received) < 20:
            received.append((await gateway.recv()).steps)
        assert received == list(range(20))
        instance.close()
        gateway.close()

    run(main())


def test_a_peer_that_does_not_read_causes_backpressure(run: Run, address: str) -> None:
    async def main() -> None:
        gateway = listen(address, high_water=4)
        instance = dial(gateway.address, high_water=4)
        instance.send(Starting(phase="up"))
        await gateway.recv()
        sent = 0
        try:
            while sent < 100_000:
                gateway.send(Abort(request_ids=["x" * 10_000, str(sent)]))
                sent += 1
        except Backpressure:
            pass
        assert 0 < sent < 100_000
        received = [(await instance.recv()).request_ids[1] for _ in range(sent)]
        assert received == [str(i) for i in range(sent)]
        instance.close()
        gateway.close()

    run(main())


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"hello", b"\x81\xa4type\xa5drain", b"\x81\xa4type\xa3\xff\xfe\xfd"])
def test_a_malformed_message_closes_the_link(
    run: Run, address: str, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gateway = listen(address)
        with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
            stranger.connect(gateway.address)
            stranger.send(frame)
            with caplog.at_level(logging.ERROR), pytest.raises(LinkClosed, match="malformed"):
                await gateway.recv()
        assert "malformed" in caplog.text
        with pytest.raises(LinkClosed):
            await gateway.recv()

    run(main())


def test_messages_over_the_limit(run: Run, address: str) -> None:
    async def main() -> None:
        gateway = listen(address, max_message_bytes=1000)
        instance = dial(gateway.address)
        with pytest.raises(ValueError, match="exceeds the limit"):
            gateway.send(Abort(request_ids=["x" * 2000]))
        instance.send(Starting(phase="y" * 2000))
        with pytest.raises(LinkClosed):
            await gateway.recv()
        instance.close()
        gateway.close()

    run(main())


def test_dialling_where_nobody_listens(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        link = dial(f"ipc://{tmp_path}/nobody")
        with pytest.raises(LinkClosed):
            await link.recv()
        link.close()

    run(main())


def test_an_address_that_cannot_be_bound(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="no-such-folder"):
            listen(f"ipc://{tmp_path}/no-such-folder/link")
        with pytest.raises(OSError, match="x" * 200):
            listen(f"ipc://{tmp_path}/{'x' * 200}")

    run(main())
