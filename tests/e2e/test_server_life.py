"""How a server starts and ends: told to, killed, or unable to begin. No process is ever left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.live_server import HANG_S, TEXT, LiveServer, serve_command, wait_until

QUICK = ("--threads", "1", "--dtype", "float32", "--num-kv-blocks", "300")
LONG = {"prompt": "go on", "max_tokens": 1000, "ignore_eos": True, "return_token_ids": True}


def test_sigterm_drains(live_model: Path) -> None:
    """What runs is finished, what comes is refused, then everything is gone."""
    with LiveServer(live_model, *QUICK, "--drain-timeout", "600") as server, server.client() as client:
        [instance] = server.instances()
        with server.stream(TEXT, LONG) as reader:
            reader.read_tokens(1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503, "the server drains")
            for stream in (False, True):
                refused = client.post(TEXT, json={"prompt": "too late", "stream": stream})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert int(refused.headers["retry-after"]) >= 1
            assert client.get("/health").status_code == 200
            reader.read_all()
        assert len(reader.outputs[0].token_ids) == 1000
        assert server.process.wait(HANG_S) == 0
        assert not instance.is_running()
        assert "Traceback" not in server.log


def test_drain_has_an_end(live_model: Path) -> None:
    """Streams that take longer are told, and the server still ends well."""
    with LiveServer(live_model, *QUICK, "--drain-timeout", "0") as server, server.client() as client:
        with client.stream("POST", TEXT, json={**LONG, "max_tokens": 4000, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert events[-1] == "data: [DONE]"
        assert server.process.wait(HANG_S) == 0
        assert "Traceback" not in server.log


def test_second_signal_ends_at_once(live_model: Path) -> None:
    with LiveServer(live_model, *QUICK, "--drain-timeout", "600") as server, server.client() as client:
        [instance] = server.instances()
        with server.stream(TEXT, {**LONG, "max_tokens": 4000}) as reader:
            reader.read_tokens(1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503, "the server drains")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(HANG_S) == 128 + signal.SIGTERM
        assert gone(instance)


def test_instance_ends_when_its_server_is_killed(live_model: Path) -> None:
    with LiveServer(live_model, *QUICK) as server:
        [instance] = server.instances()
        with server.stream(TEXT, {**LONG, "max_tokens": 4000}) as reader:
            reader.read_tokens(1)
            server.process.kill()
            assert server.process.wait(HANG_S) == -signal.SIGKILL
        assert gone(instance)


def test_instance_that_loads_ends_when_its_server_is_killed(
    live_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = subprocess.Popen(
        serve_command(live_model, *QUICK),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("t"))},
    )
    assert server.stderr is not None
    while b"instance is starting" not in (line := server.stderr.readline()):
        assert line, "the server ended"
    [instance] = psutil.Process(server.pid).children(recursive=True)
    server.kill()
    server.communicate()
    assert gone(instance)


def gone(process: psutil.Process) -> bool:
    """Whether the process ends."""
    return not psutil.wait_procs([process], HANG_S)[1]


def refusal(*command: str) -> str:
    """What a server that cannot start says beside its log, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    *log, error = done.stderr.splitlines()
    assert all(" info " in line for line in log), done.stderr
    assert error.startswith("kllm: error: ")
    return error


def test_port_in_use(live_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refusal(*serve_command(live_model, *QUICK), "--port", str(port))
    assert error == f"kllm: error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut weights": (cut_weights, "model.safetensors: truncated or damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors files"),
    "weights of another shape": (
        change_config(intermediate_size=256),
        "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape [128, 64], expected [256, 64]",
    ),
    "a layer missing": (change_config(num_hidden_layers=3), "model.layers.2."),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config cut off": (lambda folder: (folder / "config.json").write_text('{"a'), "config.json: not valid JSON"),
    "unknown architecture": (change_config(architectures=["MambaForCausalLM"], model_type="mamba"), "MambaForCausalLM"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "tokenizer cut off": (lambda folder: (folder / "tokenizer.json").write_text('{"a'), "tokenizer.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_model_folder(live_model: Path, tmp_path: Path, name: str) -> None:
    damage, says = BROKEN[name]
    folder = Path(shutil.copytree(live_model, tmp_path / "broken"))
    damage(folder)
    error = refusal(*serve_command(folder, *QUICK))
    assert str(folder) in error
    assert says in error


def test_no_such_model(tmp_path: Path) -> None:
    assert "nothing-here" in refusal(*serve_command(tmp_path / "nothing-here", *QUICK))


def test_kv_cache_that_holds_nothing(live_model: Path) -> None:
    assert "KV" in refusal(*serve_command(live_model, "--threads", "1", "--kv-cache-memory", "1"))
