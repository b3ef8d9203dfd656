"""Instances as real processes over ZeroMQ."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import support
import uvloop
from support.scripted_instance import make_request, reference

from kllm.cluster.gateway import Gateway, InstanceFailed
from kllm.cluster.launchers.launcher import LaunchError
from kllm.cluster.launchers.local import LocalInstance, LocalLauncher
from kllm.messages import Hello, Starting

SUPPORT = Path(next(iter(support.__path__)))
Run = Callable[[Coroutine[Any, Any, None]], None]


class Launcher(LocalLauncher):
    """Remembers what it launched. Each launch takes the next behaviour; the last one stays."""

    def __init__(self, *behaviours: str) -> None:
        self.launched: list[LocalInstance] = []
        self.addresses: list[str] = []
        self._behaviours = list(behaviours)
        super().__init__(self._command)

    def _command(self, address: str) -> list[str]:
        self.addresses.append(address)
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        return [sys.executable, str(SUPPORT / "instance_process.py"), behaviour, address]

    async def launch(self) -> LocalInstance:
        self.launched.append(await super().launch())
        return self.launched[-1]

    def assert_gone(self) -> None:
        for instance, address in zip(self.launched, self.addresses, strict=True):
            with pytest.raises(ProcessLookupError):
                os.kill(instance.pid, 0)
            assert not Path(address.removeprefix("ipc://")).parent.exists()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_main(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 30))

    return run_main


def test_a_stream_survives_kill_9(run: Run) -> None:
    async def main() -> None:
        launcher = Launcher("stream")
        gateway = Gateway([launcher], rng=random.Random(1))
        await gateway.start()
        streams = [gateway.generate(make_request(str(i), [i + 1], max_tokens=100, ignore_eos=True)) for i in range(8)]
        seen: list[list[int]] = [[] for _ in streams]

        async def read(i: int) -> str | None:
            async for delta in streams[i]:
                seen[i] += delta.token_ids
                if i == 0 and len(seen[0]) > 30 and gateway.restarts == 0 and len(launcher.launched) == 1:
                    os.kill(launcher.launched[0].pid, signal.SIGKILL)
            return delta.finish_reason

        assert await asyncio.gather(*map(read, range(8))) == ["length"] * 8
        assert seen == [reference(stream.request)[0] for stream in streams]
        assert gateway.restarts == 1
        gateway.check()
        await gateway.drain(5.0)
        launcher.assert_gone()

    run(main())


def test_a_process_that_dies_at_start_is_quoted(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        launcher = Launcher("die")
        with pytest.raises(InstanceFailed, match=r"(?s)exited with status 3.*no such tensor: lm_head"):
            await Gateway([launcher], rng=random.Random(1)).start()
        launcher.assert_gone()

    run(main())
    assert "no such tensor: lm_head" in capfd.readouterr().err


def test_a_mute_process_is_killed(run: Run) -> None:
    async def main() -> None:
        launcher = Launcher("mute")
        gateway = Gateway([launcher], rng=random.Random(1), start_timeout=1.0, stop_grace=0.2)
        with pytest.raises(InstanceFailed, match="not ready after 1 s"):
            await gateway.start()
        launcher.assert_gone()

    run(main())


def test_stop_is_graceful_and_idempotent(run: Run) -> None:
    async def main() -> None:
        launcher = Launcher("stream")
        instance = await launcher.launch()
        folder = Path(launcher.addresses[0].removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert isinstance(await instance.link.recv(), Starting)
        assert isinstance(await instance.link.recv(), Hello)
        await instance.stop(5.0)
        assert await instance.wait() == f"instance process {instance.pid} was killed by SIGTERM"
        await instance.stop(5.0)
        launcher.assert_gone()

    run(main())


def test_a_command_that_does_not_exist(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(LaunchError, match="no-such-program: No such file"):
            await LocalLauncher(lambda _: ["/no-such-program"]).launch()

    run(main())


def test_an_instance_does_not_outlive_its_gateway() -> None:
    command = [sys.executable, str(SUPPORT / "gateway_process.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        instance = os.pidfd_open(int(gateway.stdout.readline()))
        assert gateway.stdout.readline() == "ready\n"
        gateway.kill()
    exited, _, _ = select.select([instance], [], [], 20)
    os.close(instance)
    assert exited, "the instance still runs"
