"""`serve` as a process of its own, with a real instance and a tiny model."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import httpx
import pytest

from kllm.cluster.routers import ROUTERS
from kllm.config import EngineConfig, ServerConfig
from kllm.server.main import ServeError, instance_config, with_transfer

MAIN = """
import sys
from kllm.config import EngineConfig, ServerConfig
from kllm.server.main import ServeError, serve
try:
    serve(EngineConfig(**{engine!r}), ServerConfig(**{server!r}))
except (ServeError, ValueError) as error:
    sys.exit(f"error: {{error}}")
"""


def command(model: Path, engine: dict[str, object] | None = None, **server: object) -> list[str]:
    engine = {"model": str(model), "threads": 1, "dtype": "float32", "num_kv_blocks": 64, **(engine or {})}
    return [sys.executable, "-c", MAIN.format(engine=engine, server={"port": 0, **server})]


@contextmanager
def started(argv: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, URL), once it has said that it is ready."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("kLLM is ready: http://127.0.0.1:"), (line, process.communicate())
        yield process, line.split()[3]
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_then_drains(tiny_llama_folder: Path, number: int) -> None:
    argv = command(tiny_llama_folder, served_model_name=["tiny", "other"], drain_timeout=20)
    with started(argv) as (process, url), httpx.Client(base_url=url, timeout=30) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
        body = {"model": "tiny", "prompt": "the end", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(number)
            events = [first, *(line for line in lines if line)]
        assert events[-1] == "data: [DONE]"
        ids = [token for event in events[:-1] for token in json.loads(event[6:])["choices"][0]["token_ids"]]
        assert len(ids) == 200
        assert process.wait(20) == 0


def test_port_in_use(tiny_llama_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(command(tiny_llama_folder, port=port), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def test_instance_that_cannot_start(tiny_llama_folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tiny_llama_folder, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = subprocess.run(command(broken), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the model could not be started" in done.stderr
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_model(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "nothing"), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_instances_share_the_machine() -> None:
    config, machine = EngineConfig(model="m"), (10, 12 * 2**30)
    assert instance_config(config, 0, 1, *machine) == config
    assert instance_config(config, 1, 3, *machine) == EngineConfig(model="m", threads=3, kv_cache_memory=2**30)
    assert instance_config(config, 0, 20, *machine).threads == 1
    given = EngineConfig(model="m", threads=8, num_kv_blocks=100, record_steps=Path("a/steps.jsonl"))
    expected = {"threads": 8, "num_kv_blocks": 100, "kv_cache_memory": None, "record_steps": Path("a/steps-1.jsonl")}
    assert instance_config(given, 1, 2, *machine).model_dump(include=set(expected)) == expected
    with pytest.raises(ServeError, match="bind_threads"):
        instance_config(EngineConfig(model="m", bind_threads=True), 0, 2, *machine)


def test_instances_of_pools_hand_kv_over() -> None:
    assert with_transfer(EngineConfig(model="m")).kv_transfer == "shm"
    given = EngineConfig(model="m", kv_transfer="mooncake")
    assert with_transfer(given) == given
    with pytest.raises(ServeError, match="--prefill and --decode need enable_prefix_caching"):
        with_transfer(EngineConfig(model="m", enable_prefix_caching=False))


def test_every_instance_publishes_its_own_cache_events() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5560"}
    config = EngineConfig.model_validate({"model": "m", "kv_events_config": events})
    third = instance_config(config, 2, 3, 4, 2**30).kv_events_config
    assert third is not None
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "tcp://*:5562")
    assert instance_config(config, 0, 1, 4, 2**30) == config
    with pytest.raises(ServeError, match=r"kv_events_config: .*at least 4 ports apart"):
        instance_config(config, 0, 4, 4, 2**30)
    off = EngineConfig.model_validate({"model": "m", "kv_events_config": {**events, "enable_kv_cache_events": False}})
    assert instance_config(off, 0, 4, 4, 2**30).kv_events_config == off.kv_events_config


def test_every_router_has_a_name_in_the_config() -> None:
    assert set(get_args(ServerConfig.model_fields["routing"].annotation)) == set(ROUTERS)


def test_starts_without_torch_or_web_stack() -> None:
    """What is imported before the instance runs delays it."""
    code = (
        "import sys, kllm.server.main; print([m for m in ('torch', 'fastapi', 'uvicorn', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
