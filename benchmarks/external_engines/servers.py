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
from collections.abc import Iterator
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


def vllm_command(source: ModelSource, place: Place, blocks: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment variables of `vllm serve`. Raises ServerFailed where vLLM is not installed."""
    environments = Environments(CACHE)
    python = environments.python("vllm")
    if not python.exists():
        raise ServerFailed(
            f"{python} does not exist: install it with make bench-peers ARGS='--engines vllm-bf16 "
            "--install-only', or measure with --engine kllm"
        )
    folder = Models(source, environments).get("folder", lambda text: None)
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "model",
        "--host", "127.0.0.1", "--port", str(place.port), "--dtype", "bfloat16", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--enable-prefix-caching",
        "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks),
        "--kv-events-config", place.publishing(),
    ]  # fmt: skip
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": str(place.number % (os.cpu_count() or 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    return command, environments.variables("vllm", 1) | own


def kllm_command(source: ModelSource, place: Place, blocks: int) -> tuple[list[str], dict[str, str]]:
    """The same of `kllm serve`."""
    command = [
        sys.executable, "-m", "kllm.cli", "serve", str(source.path), "--served-model-name", "model",
        "--port", str(place.port), "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8",
        "--block-size", str(BLOCK_TOKENS), "--num-kv-blocks", str(blocks), "--kv-events-config", place.publishing(),
    ]  # fmt: skip
    return command, {}


COMMANDS = {"vllm": vllm_command, "kllm": kllm_command}


@contextlib.contextmanager
def running(engine: str, source: ModelSource, count: int, blocks: int, folder: Path) -> Iterator[list[Place]]:
    """So many engines, each with a KV cache of `blocks` blocks, ready. Raises ServerFailed."""
    places = [Place(number, port, folder) for number, port in enumerate(_free_ports(count))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place in places:
            command, variables = COMMANDS[engine](source, place, blocks)
            with open(place.log, "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **variables, "TMPDIR": str(folder)},
                        start_new_session=True,
                    )
                )
        for place, process in zip(places, processes, strict=True):
            _wait_ready(place, process)
        yield places
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


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
