"""Instances as child processes of the gateway, over ZeroMQ on a Unix socket that only this user can reach.

The child gets a session of its own, so that Ctrl-C in the terminal reaches the gateway alone, which then drains.
A child must not outlive its gateway: it exits when its link closes, which the kernel does even for a gateway
killed by SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Sequence

from kllm.cluster.launchers.launcher import LaunchError
from kllm.messages import Down, Up
from kllm.transport.zeromq import ZmqLink, listen

TAIL_BYTES = 8192  # of the child's output, kept to say why it died
TAIL_LINES = 20
PIPE_GRACE_S = 1.0  # a grandchild may keep the pipe open after the child's exit


class LocalInstance:
    """A child process. What it prints goes to this process's standard error, its last lines into the exit reason."""

    def __init__(self, process: Process, link: ZmqLink[Up, Down], folder: tempfile.TemporaryDirectory[str]) -> None:
        self.link = link
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._tail = b""
        self._life = asyncio.create_task(self._follow())

    async def wait(self) -> str:
        return await asyncio.shield(self._life)

    async def stop(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.wait()
        finally:
            if not self._life.done():  # cancelled: leave nothing running
                self._signal(signal.SIGKILL)
            self.link.close()
            self._folder.cleanup()

    def _signal(self, number: int) -> None:
        """SIGTERM to the child; SIGKILL to its whole session."""
        if self._process.returncode is not None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)
        except ProcessLookupError:
            pass

    async def _follow(self) -> str:
        output = asyncio.create_task(self._pass_output_on())
        status = await self._process.wait()
        await asyncio.wait((output,), timeout=PIPE_GRACE_S)
        output.cancel()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        reason = f"instance process {self.pid} {how}"
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return "\n".join([f"{reason}; its last output was:", *lines[-TAIL_LINES:]]) if lines else reason

    async def _pass_output_on(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(65536):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


class LocalLauncher:
    """argv: makes the command line from the address that the instance is to dial."""

    def __init__(self, argv: Callable[[str], Sequence[str]]) -> None:
        self._argv = argv

    async def launch(self) -> LocalInstance:
        folder = tempfile.TemporaryDirectory(prefix="kllm-", ignore_cleanup_errors=True)  # made with mode 0700
        try:
            link = listen(f"ipc://{folder.name}/link")
        except OSError as error:
            folder.cleanup()
            raise LaunchError(f"cannot make a socket for the instance (is TMPDIR too long?): {error}") from error
        argv = self._argv(link.address)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
            )
        except BaseException as error:
            link.close()
            folder.cleanup()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot start {argv[0]}: {error.strerror}") from error
            raise
        return LocalInstance(process, link, folder)
