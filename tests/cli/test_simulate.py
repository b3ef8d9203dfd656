"""`kllm simulate` as users and programs run it, on a small trace of our own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kllm.cli.app import main
from kllm.cli.options import Flags, config_flags, flag_name
from kllm.cli.simulate import LINE_EVERY_S, ProgressLines
from kllm.simulation.config import SimulationConfig

PROMISED = {"decision_hash", "requests", "completed", "ttft_s", "tpot_s", "goodput_rps", "hit_rate"}
PROMISED |= {"simulated_s", "wall_s"}


@dataclass
class Ended:
    status: int
    out: str
    err: str


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 250 * index, "input_length": 1100, "output_length": 20 + index, "hash_ids": [0, 1, 2 + index]}
        for index in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], trace: Path):
    """Run the command in this process on the trace (unless told otherwise) and two instances."""

    def run(*arguments: str) -> Ended:
        given = [] if "--config" in arguments else ["--trace", str(trace), "--instances", "2"]
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *given, *arguments])
        captured = capsys.readouterr()
        return Ended(ended.value.code or 0, captured.out, captured.err)

    return run


def test_json_is_all_of_standard_output_and_has_the_promised_keys(simulate):
    result = simulate("--json")
    assert result.status == 0, result.err
    summary = json.loads(result.out)
    assert set(summary) >= PROMISED
    assert summary["requests"] == summary["completed"] == 40
    assert 0 < summary["hit_rate"]["l1"] < 1
    assert summary["ttft_s"]["p50"] <= summary["ttft_s"]["p99"]


def test_a_seed_gives_one_history(simulate):
    hashes = [json.loads(simulate("--json", "--seed", seed).out)["decision_hash"] for seed in ("1", "1", "2")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_table_for_people(simulate):
    result = simulate()
    assert "Time to first token" in result.out
    assert "40 of 40" in result.out
    assert "{" not in result.out


def test_page_and_decision_log_are_written(simulate, tmp_path):
    page, log = tmp_path / "page.html", tmp_path / "decisions.txt"
    summary = json.loads(simulate("--json", "--page", str(page), "--decisions", str(log)).out)
    assert summary["decision_hash"] in page.read_text()
    assert len(log.read_text().splitlines()) > 40


def test_faults_are_injected_and_reported(simulate):
    summary = json.loads(simulate("--json", "--faults", "3 crash 1").out)
    assert summary["faults"] == ["3 crash 1"]
    assert summary["retried"] > 0
    assert summary["completed"] == 40


def test_options_from_a_file_and_flags_win_over_it(simulate, trace, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(f'trace = "{trace}"\ninstances = 3\nseed = 5\nnum_prompts = 7\n')
    summary = json.loads(simulate("--config", str(path), "--json", "--seed", "6").out)
    assert summary["requests"] == 7
    assert summary["settings"]["instances"] == 3
    assert summary["settings"]["seed"] == 6


def test_lower_tiers_by_flags_and_from_a_file(simulate, trace, tmp_path):
    flags = (
        "--l2-memory 1GiB --l2-write back --l3 shared --l3-capacity 2GiB --l3-min-reuse 2 --fetch always --l3-gb-s 5"
    )
    by_flags = json.loads(simulate("--json", *flags.split()).out)
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'trace = "{trace}"\ninstances = 2\nl2_memory = "1GiB"\nl2_write = "back"\nl3 = "shared"\n'
        'l3_capacity = "2GiB"\nl3_min_reuse = 2\nfetch = "always"\nl3_gb_s = 5\n'
    )
    from_file = json.loads(simulate("--json", "--config", str(path)).out)
    assert by_flags["decision_hash"] == from_file["decision_hash"]
    assert by_flags["tiers"]["l2_capacity"] == 2 * (2**30 // (53_940 * 64))
    assert simulate("--json", "--l2-memory", "lots").status == 2


def test_yaml_is_read_too(simulate, trace, tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(f"trace: {trace}\ninstances: 1\nnum_prompts: 5\n")
    assert json.loads(simulate("--config", str(path), "--json").out)["requests"] == 5


def test_yaml_without_pyyaml_is_said(simulate, tmp_path, monkeypatch):
    path = tmp_path / "fleet.yml"
    path.write_text("instances: 1\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    result = simulate("--config", str(path))
    assert result.status == 1
    assert "YAML needs pyyaml" in result.err


def endless(names: list[str]) -> str:
    """A few lines of YAML whose last value would have 9 to the power of their number parts, written out."""
    lines = [f"{names[0]}: &{names[0]} [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise(names)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.toml", "instnces = 3", "unknown key 'instnces'; did you mean 'instances'?"),
        ("f.toml", "instances = 0", "instances: input should be greater than or equal to 1 (got 0)"),
        ("f.toml", "[fleet]\ninstances = 3", "unknown key 'fleet'"),
        ("f.toml", "instances = ", "is not TOML"),
        ("f.yaml", "- 3", "must map names of options to values"),
        ("f.yaml", "1: 3", "must map names of options to values"),
        ("f.yaml", "a: [", "is not YAML"),
        ("f.yaml", "!!python/object/apply:os.getcwd []", "is not YAML"),
        ("f.yaml", endless(list("abcdefghi")), "unknown key 'a'"),
        ("f.yaml", endless([*SimulationConfig.model_fields][:9]), ": must be one value, or a list of them"),
        ("f.yaml", "instances: [1, 2]", "instances: input should be a valid integer (got [1, 2])"),
        ("f.toml", "# " + "x" * 2**20, "larger than 1,048,576 bytes"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(simulate, tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    result = simulate("--config", str(path))
    assert result.status == 1
    assert result.err.startswith(f"kllm: error: {path}: ")
    assert message in result.err
    assert len(result.err) < 1000
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_a_file_may_need_a_flag(simulate, trace, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(f'trace = "{trace}"\narrivals = "gamma"\ninstances = 1\n')
    assert "arrivals: needs a request rate" in simulate("--config", str(path)).err
    assert simulate("--config", str(path), "--request-rate", "20", "--instances", "zwei").err.startswith(
        "kllm: error: --instances: "
    )
    assert simulate("--config", str(path), "--request-rate", "20").status == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--instances", "4", "--prefill", "2", "--decode", "2"], 2, "give either instances, or prefill and decode"),
        (["--decode", "2"], 2, "prefill and decode go together"),
        (["--pools", "nearest"], 2, "'nearest' is not one of global"),
        (["--instances", "0"], 2, "--instances: input should be greater than or equal to 1"),
        (["--page", "/nonexistent/page.html"], 1, "/nonexistent/page.html: the folder does not exist"),
        (["--decisions", "/nonexistent/log"], 1, "/nonexistent/log: the folder does not exist"),
        (["--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
        (["--trace", "/nonexistent.jsonl"], 1, "/nonexistent.jsonl"),
        (["--model", "gpt-9"], 1, "gpt-9"),
        (["--hardware", "abacus"], 1, "abacus"),
        (["--faults", "3 sneeze 1"], 1, "'3 sneeze 1' is not a fault"),
        (["--faults", "3 crash 9"], 1, "there is no instance 9"),
    ],
)
def test_errors_are_one_line_and_have_a_status(simulate, arguments, status, message):
    result = simulate(*arguments)
    assert result.status == status
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_a_broken_trace_is_named_with_line_and_field(simulate, tmp_path):
    path = tmp_path / "broken.jsonl"
    good = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"input_length": -4}) + "\n")
    result = simulate("--trace", str(path))
    assert result.status == 1
    assert f"{path}, line 2, field input_length" in result.err


def test_every_field_has_a_flag():
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @config_flags(SimulationConfig)
    def command(flags: Flags) -> None:
        raise AssertionError("help must not run the command")

    shown = CliRunner().invoke(app, ["--help"]).output
    text = "".join(shown.split())  # lines break between words and after hyphens
    for name, field in SimulationConfig.model_fields.items():
        assert flag_name(name) in text
        assert "".join(field.description.split()) in text


def test_without_a_terminal_a_line_now_and_then():
    now = 0.0
    lines: list[str] = []
    progress = ProgressLines(lambda: now, lines.append)
    for step in range(50):
        now = step * LINE_EVERY_S / 20
        progress(step * 90.0, step, 1234)
    assert lines == [
        "simulated 0:30:00, 20 of 1,234 requests ended",
        "simulated 1:00:00, 40 of 1,234 requests ended",
    ]


def test_a_bar_on_a_terminal(trace):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kllm.cli", "simulate", "--trace", str(trace), "--instances", "2", "--json"]
    command += ["--faults", "3 crash 1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        out, drawn = process.stdout.read(), read_all(ours)
    assert process.returncode == 0
    assert json.loads(out)["completed"] == 40
    assert "Simulating" in drawn
    assert "/40" in drawn
    assert "crash" not in drawn, "the gateway's log of what was asked for would spoil the bar"


def read_all(descriptor: int) -> str:
    """What was written to the terminal until its other side closed."""
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:  # how Linux says that the other side is gone
        pass
    os.close(descriptor)
    return b"".join(parts).decode()
