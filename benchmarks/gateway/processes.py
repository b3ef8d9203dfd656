"""The processes under measurement: started, watched, and gone afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks.gateway.server import ServerSettings
from benchmarks.simulation_accuracy.real import ServerFailed

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 30
READY = re.compile(r"kLLM is ready: http://([^:]+):(\d+)")


class Served:
    """A server that listens. cpu_s: of its own process, without instances."""

    def __init__(self, host: str, port: int, process: psutil.Process) -> None:
        self.host, self.port, self.process = host, port, process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def gateway_server(settings: ServerSettings) -> Iterator[Served]:
    """Raises ServerFailed."""
    with tempfile.TemporaryFile() as log:
        process = _start("benchmarks.gateway.server", msgspec.json.encode(settings).decode(), log=log)
        try:
            assert process.stdout is not None
            ready = READY.match(process.stdout.readline())
            if ready is None:
                log.seek(0)
                raise ServerFailed(f"the server did not start: {log.read().decode(errors='replace')[-2000:]}")
            yield Served(ready[1], int(ready[2]), psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            _wait(process)


@contextmanager
def bare_server(step_s: float, tokens: int) -> Iterator[Served]:
    process = _start("benchmarks.gateway.bare_server", str(step_s), str(tokens))
    try:
        assert process.stdout is not None
        yield Served("127.0.0.1", int(process.stdout.readline()), psutil.Process(process.pid))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        _wait(process)


def _start(module: str, *arguments: str, log: object = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,  # type: ignore[call-overload]
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
