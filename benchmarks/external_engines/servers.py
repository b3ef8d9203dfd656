"""Engines as programs of their own: vLLM for the CPU, or kLLM's own server in that role."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peers.environments import Environments
from benchmarks.peers.models import Models
from kllm.cluster.external.config import ExternalEngine
from kllm.hub.source import ModelSource

START_S = 600.0
STOP_S = 20.0
BLOCK_TOKENS = 32  # the smallest of vLLM's on CPUs
MAX_MODEL_LEN = 1024
CACHE = Path("~/.cache/kllm/peers").expanduser()
Command = tuple[list[str], dict[str, str]]  # and further environment variables


class ServerFailed(RuntimeError):
    """An engine could not be started; the message holds the last lines that it printed."""


@dataclass(frozen=True)
class Place:
    """Of one engine: its number, its port, and a folder for its sockets and its log."""

    number: int
    port: int
    folder: Path

    @property
    def events(self) -> str:
        return f"ipc://{self.folder}/events-{self.number}"

    @property
    def replay(self) -> str:
        return f"ipc://{self.folder}/replay-{self.number}"

    @property
    def log(self) -> Path:
        return self.folder / f"engine-{self.number}.log"

    def publishing(self) -> str:
        """--kv-events-config."""
        return json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.events,
                "replay_endpoint": self.replay,
            }
        )

    def config(self, *, events: bool) -> ExternalEngine:
        """As an operator would write it into the gateway's configuration."""
        url = f"http://127.0.0.1:{self.port}"
        if not events:
            return ExternalEngine(url=url)
        return ExternalEngine(url=url, kv_events=self.events, replay=self.replay)


def vllm_server(source: ModelSource, place: Place, cores: int) -> Command:
    """Command and environment variables of `vllm serve` with bf16. Raises ServerFailed where it is not installed."""
    environments = Environments(CACHE)
    python = environments.python("vllm")
    if not python.exists():
        raise ServerFailed(
            f"{python} does not exist: install it with make bench-peers ARGS='--engines vllm-bf16 --install-only', "
            "or leave vLLM out"
        )
    folder = Models(source, environments).get("folder", lambda text: None)
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "model",
        "--host", "127.0.0.1", "--port", str(place.port), "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN),
    ]  # fmt: skip
    return command, environments.variables("vllm", cores)


def kllm_server(source: ModelSource, place: Place) -> Command:
    """The same of `kllm serve`, with the weights as shipped."""
    command = [
        sys.executable, "-m", "kllm.cli", "serve", str(source.path), "--served-model-name", "model",
        "--port", str(place.port), "--max-model-len", str(MAX_MODEL_LEN),
    ]  # fmt: skip
    return command, {}


def vllm_command(source: ModelSource, place: Place, blocks: int) -> Command:
    """vLLM on one core, with a small cache that it tells of."""
    command, variables = vllm_server(source, place, 1)
    command += [
        "--enforce-eager", "--max-num-seqs", "8", "--enable-prefix-caching",
        "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks),
        "--kv-events-config", place.publishing(),
    ]  # fmt: skip
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": str(place.number % (os.cpu_count() or 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    return command, variables | own


def kllm_command(source: ModelSource, place: Place, blocks: int) -> Command:
    """kLLM on one core, with a small cache that it tells of."""
    command, variables = kllm_server(source, place)
    command += [
        "--threads", "1", "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS), "--num-kv-blocks", str(blocks),
        "--kv-events-config", place.publishing(),
    ]  # fmt: skip
    return command, variables


COMMANDS = {"vllm": vllm_command, "kllm": kllm_command}


@contextlib.contextmanager
def running(engine: str, source: ModelSource, count: int, blocks: int, folder: Path) -> Iterator[list[Place]]:
    """So many engines, each with a KV cache of `blocks` blocks, ready. Raises ServerFailed."""
    places = free_places(count, folder)
    with started({place: COMMANDS[engine](source, place, blocks) for place in places}):
        yield places


@contextlib.contextmanager
def started(commands: Mapping[Place, Command]) -> Iterator[None]:
    """These servers, ready; their output goes to the logs of their places. Raises ServerFailed."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place, (command, variables) in commands.items():
            with open(place.log, "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **variables, "TMPDIR": str(place.folder)},
                        start_new_session=True,
                    )
                )
        for place, process in zip(commands, processes, strict=True):
            _wait_ready(place, process)
        yield
    finally:
        _stop(processes)


def _wait_ready(place: Place, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailed(
                f"engine {place.number} ended with status {process.returncode}: {_last_lines(place.log)}"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{place.port}/v1/models", verify=False, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise ServerFailed(f"engine {place.number} was not ready after {START_S:g} s: {_last_lines(place.log)}")


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)


def free_places(count: int, folder: Path) -> list[Place]:
    """With ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [Place(number, listener.getsockname()[1], folder) for number, listener in enumerate(listeners)]
