"""Commands that run a model, on a tiny one: the single path from the command line to tokens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

ENGINE = ("--num-kv-blocks", "100", "--threads", "1")


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def running_commands() -> list[str]:
    """Command lines of all processes, but of those that end while this looks."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_text(errors="replace"))
    return commands


def test_chat_starts_a_server_of_its_own_and_stops_it(tiny_llama_folder: Path):
    flags = ("--max-tokens", "8", "--temperature", "0")
    result = run("chat", str(tiny_llama_folder), *flags, *ENGINE, stdin="hello\nhello again\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 2
    assert "Traceback" not in result.stderr
    assert not any(str(tiny_llama_folder) in command for command in running_commands())


def test_chat_says_why_a_server_did_not_start(tiny_llama_folder: Path):
    result = run("chat", str(tiny_llama_folder), "--kv-cache-memory", "1", "--threads", "1", stdin="hello\n")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"kllm: error: the server for {tiny_llama_folder} did not start: ")
    assert "Traceback" not in result.stderr


def test_bench_latency_ends_with_json(tiny_llama_folder: Path):
    lengths = ("--input-len", "16", "--output-len", "8", "--vocab-size", "270", "--iterations", "2")
    result = run("bench", "latency", str(tiny_llama_folder), "--dtype", "bf16", *lengths, *ENGINE, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["ttft_ms"] > 0
    assert figures["decode_tokens_per_s"] > 0
    assert figures["dtype"] == "bfloat16"


def test_bench_throughput_ends_with_json(tiny_llama_folder: Path):
    lengths = ("--num-prompts", "6", "--input-len", "16", "--output-len", "8", "--vocab-size", "270")
    result = run("bench", "throughput", str(tiny_llama_folder), *lengths, *ENGINE, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["output_tokens"] == 48
    assert min(figures[name] for name in ("output_tokens_per_s", "total_tokens_per_s", "peak_rss_mb")) > 0


def test_bench_names_a_vocabulary_that_is_too_large(tiny_llama_folder: Path):
    result = run("bench", "latency", str(tiny_llama_folder), "--output-len", "2", *ENGINE)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "kllm: error: a prompt has token ids outside the vocabulary"
