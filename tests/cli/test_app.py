"""The command as users run it: exit statuses, one-line errors, and what start-up may import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kllm


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_version():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"kllm {kllm.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["serve", "smollm2", "--port", "65536"], 2, "--port: input should be less than or equal to 65535"),
        (["serve", "smollm2", "--nonsense"], 2, "No such option: --nonsense"),
        (["serve"], 2, "Missing argument"),
        (["instance", "smollm2", "--listen", "0.0.0.0:7001"], 1, "give a key file"),
        (["instance", "smollm2", "--listen", "here"], 1, "'here' is not an address such as tcp://127.0.0.1:7001"),
        (["instance", "smollm2", "--key-file", "/nonexistent"], 1, "the key file /nonexistent cannot be read"),
        (["gateway"], 2, "Missing option '--config'"),
        (["gateway", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml: No such file or directory"),
        (["gateway", "--config", "x.toml", "--instances", "2"], 2, "--instances: instances of a fleet are started"),
        (["chat"], 2, "MODEL or --url is needed"),
        (["chat", "smollm2", "--url", "http://127.0.0.1:1"], 2, "give either --url or MODEL"),
        (["bench", "latency", "smollm2", "--input-len", "0"], 2, "--input-len: input should be greater than or equal"),
        (["bench", "serve", "--url", "not a url"], 1, "no server answers at not a url"),
        (["bench", "serve", "--dataset", "azure-code", "--trace-dir", "/nonexistent"], 1, "does not exist"),
        (["pull", "no-such-model"], 1, "'no-such-model'"),
    ],
)
def test_errors_are_short_and_have_a_status(arguments, status, message):
    result = run(*arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_where_an_error_came_from():
    result = run("--debug", "pull", "no-such-model")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_start_imports_neither_torch_nor_what_other_commands_need():
    code = "import sys, json, kllm.cli.app, kllm.benchmark.config; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(result.stdout))
    assert loaded.isdisjoint({"torch", "numpy", "httpx", "fastapi", "tokenizers", "matplotlib", "kllm.llm"})


def test_serving_does_not_import_torch_in_the_server_process():
    code = "import sys, kllm.cli.app, kllm.server.main; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    "command",
    ["serve", "instance", "gateway", "pull", "chat", "verify", "bench serve", "bench latency", "bench throughput"],
)
def test_every_command_has_help(command):
    result = run(*command.split(), "--help")
    assert result.returncode == 0
    assert f"kllm {command}" in result.stdout
