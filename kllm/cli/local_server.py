"""A server process of one's own: started for a command on a free loopback port, stopped when the command ends."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from kllm.cli.errors import CommandError
from kllm.cli.options import flag_name
from kllm.config import EngineConfig

STOP_TIMEOUT_S = 10.0
_READY = re.compile(r"kLLM is ready: (\S+) ")  # what `kllm serve` prints on standard output


@dataclass(frozen=True)
class LocalServer:
    url: str
    api_key: str


@contextmanager
def local_server(config: EngineConfig) -> Iterator[LocalServer]:
    """A ready `kllm serve` for this engine. Raises CommandError when it cannot start."""
    from kllm.hub import resolve

    resolve(config.model)  # here, where its progress bar is seen
    key = secrets.token_urlsafe(16)
    with tempfile.TemporaryFile() as log, _signals_raise():
        process = _start(config, key, log)
        try:
            yield LocalServer(_wait_ready(process, config.model, log), key)
        finally:
            _stop(process)


def engine_arguments(config: EngineConfig) -> list[str]:
    """The model and flags that give this config."""
    arguments = [config.model]
    for name, value in config.model_dump(exclude={"model"}, exclude_defaults=True).items():
        if isinstance(value, bool):
            arguments.append(flag_name(name) if value else f"--no-{flag_name(name)[2:]}")
        else:
            arguments += [flag_name(name), str(value)]
    return arguments


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and a closed terminal into SystemExit, so that the server is stopped then too."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(config: EngineConfig, api_key: str, log: IO[bytes]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kllm.cli", "serve", *engine_arguments(config)]
    return subprocess.Popen(
        [*command, "--port", "0", "--api-key", api_key, "--drain-timeout", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # Ctrl-C in this terminal stops an answer, not the server
    )


def _wait_ready(process: subprocess.Popen[str], model: str, log: IO[bytes]) -> str:
    """The server's URL, once it says so. It gives up by itself when its instance takes too long."""
    from rich.console import Console

    assert process.stdout is not None
    with Console(stderr=True).status(f"Starting {model}"):
        for line in process.stdout:
            if ready := _READY.match(line):
                return ready[1]
    raise CommandError(f"the server for {model} did not start: {_last_line(log)}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask, wait, then kill the whole session: no process outlives the command."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
