"""Many gateways at one address, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from kllm.messages import Abort, Drained, Ping, Starting
from kllm.transport.fleet_key import FleetKey, key_from
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.zeromq import dial_instance
from kllm.transport.zeromq_peers import ZmqPeers

Run = Callable[[Coroutine[Any, Any, None]], None]
KEY, OTHER_KEY = key_from(b"1" * 32), key_from(b"2" * 32)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_main(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 30))

    return run_main


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link" if request.param == "ipc" else "tcp://127.0.0.1:*"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6(run: Run) -> None:
    async def main() -> None:
        peers = ZmqPeers("tcp://[::1]:*")
        gateway = dial_instance(peers.address)
        gateway.send(Ping())
        assert (await peers.recv())[1] == Ping()
        gateway.close()
        peers.close()

    run(main())


def sent(peers: ZmqPeers, peer: bytes) -> bool:
    try:
        peers.send(peer, Starting(phase="up"))
    except LinkClosed:
        return False
    return True


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "locked"])
def test_each_gateway_gets_its_own(run: Run, address: str, key: FleetKey | None) -> None:
    async def main() -> None:
        peers = ZmqPeers(address, key)
        gateways = [dial_instance(peers.address, key) for _ in range(3)]
        for index, gateway in enumerate(gateways):
            for step in range(50):
                gateway.send(Abort(request_ids=[str(index), str(step)]))
        heard: dict[bytes, list[list[str]]] = {}
        for _ in range(150):
            peer, message = await peers.recv()
            assert isinstance(message, Abort)
            heard.setdefault(peer, []).append(message.request_ids)
        names = {said[0][0]: peer for peer, said in heard.items()}
        for name, peer in names.items():
            assert heard[peer] == [[name, str(step)] for step in range(50)]
            peers.send(peer, Starting(phase=name))
        assert [(await gateway.recv()).phase for gateway in gateways] == ["0", "1", "2"]
        for gateway in gateways:
            gateway.close()
        peers.close()

    run(main())


def test_a_gateway_that_is_gone_shows_when_something_is_sent(run: Run, address: str) -> None:
    script = (
        "import asyncio, sys\n"
        "from kllm.messages import Ping\n"
        "from kllm.transport.zeromq import dial_instance\n"
        "async def main():\n"
        "    link = dial_instance(sys.argv[1])\n"
        "    link.send(Ping())\n"
        "    await link.recv()\n"
        "    await link.recv()\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        peers = ZmqPeers(address)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, peers.address)
        peer, _ = await peers.recv()
        peers.send(peer, Starting(phase="up"))
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        while sent(peers, peer):  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0.001)
        peers.close()

    run(main())


def test_the_end_of_the_instance_ends_the_links(run: Run, address: str) -> None:
    async def main() -> None:
        peers = ZmqPeers(address)
        gateway = dial_instance(peers.address)
        gateway.send(Ping())
        peer, _ = await peers.recv()
        waiting = asyncio.create_task(peers.recv())
        await asyncio.sleep(0)
        peers.send(peer, Drained())
        peers.close()
        peers.close()
        with pytest.raises(LinkClosed):
            await waiting
        with pytest.raises(LinkClosed):
            peers.send(peer, Drained())
        assert await gateway.recv() == Drained()
        await gateway.peer_gone()
        with pytest.raises(LinkClosed):
            await gateway.recv()
        gateway.close()

    run(main())


@pytest.mark.parametrize(("here", "there"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)])
def test_only_who_has_the_key_gets_in(run: Run, here: FleetKey | None, there: FleetKey | None) -> None:
    async def main() -> None:
        peers = ZmqPeers("tcp://127.0.0.1:*", here)
        stranger = dial_instance(peers.address, there)
        stranger.send(Ping())
        heard = asyncio.create_task(peers.recv())
        await stranger.peer_gone()
        assert not heard.done()
        stranger.close()
        if here is not None:
            friend = dial_instance(peers.address, here)
            friend.send(Ping())
            assert (await heard)[1] == Ping()
            friend.close()
        peers.close()
        await asyncio.gather(heard, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("turn", range(12))
def test_closing_while_gateways_are_let_in_harms_nobody(run: Run, tmp_path: Path, turn: int) -> None:
    """libuv ends the process when a descriptor that it was to watch has been closed."""

    async def main() -> None:
        peers = ZmqPeers(f"ipc://{tmp_path}/peers", KEY)
        gateways = [dial_instance(peers.address, KEY) for _ in range(3)]
        for gateway in gateways:
            gateway.send(Ping())
        for _ in range(1 + turn % 3):
            await peers.recv()
        for _ in range(turn // 3):
            await asyncio.sleep(0)
        for gateway in gateways:
            gateway.close()
        peers.close()

    run(main())


def test_who_knows_only_the_public_key_does_not_get_in(run: Run) -> None:
    async def main() -> None:
        peers = ZmqPeers("tcp://127.0.0.1:*", KEY)
        stranger = dial_instance(peers.address, FleetKey(instance=KEY.instance, gateway=OTHER_KEY.gateway))
        stranger.send(Ping())
        await stranger.peer_gone()
        stranger.close()
        peers.close()

    run(main())


def test_what_is_no_message_is_ignored(run: Run, address: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        peers = ZmqPeers(address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(peers.address)
            nested = b"\x82\xa4type\xa4ping\xa1x" + 5000 * b"\x91" + b"\x00"
            for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x81\xa4type\xa3\xff\xfe\xfd"], [nested]):
                stranger.send_multipart(frames)
            gateway = dial_instance(peers.address)
            heard = asyncio.create_task(peers.recv())
            while caplog.text.count("malformed") < 5:  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.001)
            gateway.send(Ping())
            assert (await heard)[1] == Ping()
        gateway.close()
        peers.close()

    run(main())


def test_a_gateway_that_does_not_read_causes_backpressure(run: Run, address: str) -> None:
    async def main() -> None:
        peers = ZmqPeers(address, high_water=4)
        slow, quick = dial_instance(peers.address), dial_instance(peers.address)
        slow.send(Ping())
        first, _ = await peers.recv()
        quick.send(Ping())
        second, _ = await peers.recv()
        count = 0
        try:
            while count < 100_000:
                peers.send(first, Starting(phase="x" * 10_000))
                count += 1
        except Backpressure:
            pass
        assert 0 < count < 100_000
        peers.send(second, Starting(phase="up"))
        assert await quick.recv() == Starting(phase="up")
        with pytest.raises(ValueError, match="exceeds the limit"):
            ZmqPeers.send(peers, second, Starting(phase="x" * (257 * 2**20)))
        slow.close()
        quick.close()
        peers.close()

    run(main())


def test_dialling_where_nobody_listens(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        link = dial_instance(f"ipc://{tmp_path}/nobody")
        await link.peer_gone()
        with pytest.raises(LinkClosed):
            await link.recv()
        link.close()
        with pytest.raises(OSError, match="no-such-folder"):
            ZmqPeers(f"ipc://{tmp_path}/no-such-folder/link")

    run(main())
