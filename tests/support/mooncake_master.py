"""A real mooncake_master on free ports of this host, which tests may kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_LIMIT_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stop(process: subprocess.Popen[Any]) -> None:
    """Returns when it has stopped; the signal alone leaves it time to answer once more."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


class MooncakeMaster:
    """flags: more of mooncake_master's, such as "--client_ttl=2"."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._flags = flags
        self.start()

    def start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        local = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
        self.process = subprocess.Popen(
            [program, f"--rpc_port={self.port}", *local, *self._flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        began = time.monotonic()
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                self.kill()
                raise RuntimeError(f"mooncake_master did not start on {self.address}")
            time.sleep(0.01)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        kill(self.process)

    def pause(self) -> None:
        stop(self.process)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> MooncakeMaster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
