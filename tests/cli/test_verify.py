"""`kllm verify` as users and CI run it: the exit status is the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kllm.verification.variants import VARIANTS

SMALL = ("--quick", "--tokens", "128", "--window", "64", "--threads", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_exit_status_0_and_a_report_when_all_is_within_the_limits(live_model: Path, tmp_path: Path):
    report = tmp_path / "report.json"
    result = run(str(live_model), *SMALL, "--variants", "batching", "--json", str(report))
    assert result.returncode == 0, result.stderr
    assert "batching" in result.stdout
    assert [line.split(", ")[0] for line in result.stderr.splitlines()] == ["plain: passed", "batching: passed"]
    data = json.loads(report.read_text())
    assert data["passed"] is True
    assert [variant["name"] for variant in data["variants"]] == ["batching"]
    assert data["scored_tokens"] == 2 * 63


def test_exit_status_1_when_a_named_variant_cannot_run(live_model: Path):
    result = run(str(live_model), *SMALL, "--variants", "shipped")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "kllm: error: beyond the limits: shipped (the checkpoint's weights are not quantised)"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["smollm2", "--variants", "nonsense"], 2, "--variants: nonsense is not a variant: choose from prefix-caching"),
        (["smollm2", "--tokens", "1"], 2, "--tokens: input should be greater than or equal to 32"),
        (["no-such-model"], 1, "'no-such-model'"),
        (["no-such-model", "--json", "/nonexistent/report.json"], 1, "/nonexistent/report.json: the folder does not"),
    ],
)
def test_errors_are_short_and_have_a_status(arguments, status, message):
    result = run(*arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help_names_every_variant():
    text = "".join(run("--help").stdout.replace("-\n", "-").split())
    assert all(name in text for name in VARIANTS)
