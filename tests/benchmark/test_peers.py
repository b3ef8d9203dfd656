"""benchmarks/peers: choosing, prompts, medians, merging, visits, and a whole run with a peer that cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.tiny_gguf import write_tiny_gguf

from benchmarks.peers.__main__ import prepare
from benchmarks.peers.engines import ENGINES, FIGURES, Engine, choose, choose_figures
from benchmarks.peers.environments import REQUIREMENTS, Environments, SetupError
from benchmarks.peers.models import Models, write_folder
from benchmarks.peers.report import print_report
from benchmarks.peers.results import FIELDS, Measured, build_report, median_of, merge, read_report, write_report
from benchmarks.peers.visits import RUNNERS, Setting, Visit, run_visit
from benchmarks.peers.workload import FULL, QUICK, Prompts, make_prompts
from kllm.hub.source import ModelSource, local_source

ROOT = Path(__file__).parents[2]
OURS, VLLM, STATIC = choose("kllm-bf16,vllm-bf16,transformers-bf16")
SCHEMA = {"engine", "version", "weights", *FIELDS}


def encode(text: str) -> list[int]:
    return list(text.encode())


def visit_with(**samples: float) -> Visit:
    return Visit(samples={name: [value] for name, value in samples.items()}, version="1.0", peak_rss_mb=100.0)


def report_of(*measured: Measured, figures: list[str] | None = None) -> dict[str, Any]:
    return build_report(measured, figures or list(FIGURES), FULL, "digest", "2026-01-01T00:00:00+00:00")


def test_engines_are_told_apart_and_have_all_their_files() -> None:
    assert len({engine.name for engine in ENGINES}) == len({(e.title, e.weights) for e in ENGINES}) == len(ENGINES)
    for engine in ENGINES:
        assert (RUNNERS / engine.runner).is_file()
        assert engine.environment is None or (REQUIREMENTS / f"{engine.environment}.txt").is_file()
        assert engine.leaves_out.keys() <= FIGURES.keys()


def test_every_requirement_is_pinned() -> None:
    for file in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        assert all("==" in line for line in lines), file


def test_engines_are_chosen_by_pattern() -> None:
    assert choose("all") == list(ENGINES)
    peers = choose("peers")
    assert {engine.title for engine in peers} == {engine.title for engine in ENGINES} - {"kllm"}
    assert [engine.name for engine in choose("llama*4_1, kllm-int8,llama*")] == [
        "llama.cpp-q4_1",
        "kllm-int8",
        "llama.cpp-q4_1-flash",
    ]
    with pytest.raises(ValueError, match="no engine matches 'ollama'"):
        choose("kllm-*,ollama")


def test_figures_keep_their_order() -> None:
    assert choose_figures("all") == list(FIGURES)
    assert choose_figures("shared,ttft_512") == ["ttft_512", "shared"]
    with pytest.raises(ValueError, match="unknown figures speed"):
        choose_figures("batch,speed")


def test_prompts_are_the_same_every_time() -> None:
    prompts = make_prompts(encode, FULL)
    assert prompts == make_prompts(encode, FULL)
    assert prompts.digest() == make_prompts(encode, FULL).digest() != make_prompts(encode, QUICK).digest()


def test_prompts_have_the_sizes_of_the_workload() -> None:
    prompts = make_prompts(encode, FULL)
    assert {len(ids) for ids in (*prompts.single, *prompts.batch, *prompts.shared)} == {512}
    assert [len(ids) for ids in prompts.long] == [4096]
    assert len(prompts.batch) == len(prompts.shared) == 32
    assert len({tuple(ids[:384]) for ids in prompts.shared}) == 1
    apart = [tuple(ids) for ids in (*prompts.single, *prompts.batch, *prompts.shared)]
    assert len(set(apart)) == len(apart)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        make_prompts(lambda text: list(text.encode()[:100]), FULL)


def test_medians() -> None:
    assert median_of([]) is None
    assert median_of([3.0, 100.0, 1.0]) == 3.0
    assert median_of([1.0, 2.0]) == 1.5
    assert median_of([123.4567]) == 123.5


def test_a_result_has_the_agreed_fields_and_null_for_what_was_not_taken() -> None:
    visits = [visit_with(ttft_512_ms=value, batch_output_tokens_per_s=10.0 * value) for value in (30.0, 10.0, 20.0)]
    report = report_of(Measured(VLLM, visits))
    [result] = report["results"]
    assert result.keys() >= SCHEMA
    assert (result["engine"], result["version"], result["weights"]) == ("vllm", "1.0", "bf16")
    assert (result["ttft_512_ms"], result["batch_output_tokens_per_s"], result["peak_rss_mb"]) == (20.0, 200.0, 100.0)
    assert result["ttft_4096_ms"] is result["cold_start_s"] is None
    assert report["machine"]["cores"] >= 1
    assert report["measured_at"] == "2026-01-01T00:00:00+00:00"
    assert report["samples"][0]["ttft_512_ms"] == [30.0, 10.0, 20.0]


def test_memory_is_compared_only_where_the_batch_ran() -> None:
    [result] = report_of(Measured(VLLM, [visit_with(ttft_512_ms=1.0)]), figures=["ttft_512"])["results"]
    assert result["peak_rss_mb"] is None


def test_what_is_missing_says_why() -> None:
    crashed = Measured(VLLM, [visit_with(ttft_512_ms=1.0)], failure="killed by SIGILL: no output")
    static = Measured(STATIC, [visit_with(ttft_512_ms=1.0)], left_out={"shared": "no prefixes"})
    report = report_of(crashed, static, Measured(OURS, failure="cannot be installed"))
    assert [(e["engine"], e["figure"], e["reason"]) for e in report["not_measured"]] == [
        ("vllm", "later visits", "killed by SIGILL: no output"),
        ("transformers", "shared", "no prefixes"),
        ("kllm", "all", "cannot be installed"),
    ]
    assert [result["engine"] for result in report["results"]] == ["vllm", "transformers"]
    console = Console(width=160)
    with console.capture() as shown:
        print_report(report, console)
    assert "✗" in shown.get()
    assert "cannot be installed" in shown.get()


def test_a_later_run_completes_an_earlier_one(tmp_path: Path) -> None:
    static = Measured(STATIC, [visit_with(ttft_512_ms=1.0)], left_out={"shared": "no prefixes"})
    path = tmp_path / "folder" / "peers.json"
    write_report(path, report_of(static, Measured(VLLM, [visit_with(ttft_512_ms=1.0, cold_start_s=5.0)])))
    old = read_report(path)
    assert old is not None
    new = report_of(Measured(OURS, [visit_with(ttft_512_ms=3.0)]), Measured(VLLM, [visit_with(ttft_512_ms=2.0)]))
    merged = merge(old, new)
    by_engine = {result["engine"]: result for result in merged["results"]}
    assert list(by_engine) == ["kllm", "vllm", "transformers"]
    assert (by_engine["vllm"]["ttft_512_ms"], by_engine["vllm"]["cold_start_s"]) == (2.0, 5.0)
    assert [entry["reason"] for entry in merged["not_measured"]] == ["no prefixes"]
    assert [sample["engine"] for sample in merged["samples"]] == ["transformers", "vllm", "kllm"]


def test_an_engine_that_fails_now_loses_its_earlier_figures() -> None:
    old = report_of(Measured(VLLM, [visit_with(ttft_512_ms=1.0)]))
    merged = merge(old, report_of(Measured(VLLM, failure="status 1")))
    assert merged["results"] == merged["samples"] == []
    assert [entry["reason"] for entry in merged["not_measured"]] == ["status 1"]
    again = merge(merged, report_of(Measured(VLLM, [visit_with(ttft_512_ms=2.0)])))
    assert again["not_measured"] == []


def test_figures_of_another_version_are_not_mixed() -> None:
    old = report_of(Measured(VLLM, [replace(visit_with(cold_start_s=5.0), version="0.9")]))
    [result] = merge(old, report_of(Measured(VLLM, [visit_with(ttft_512_ms=2.0)])))["results"]
    assert (result["version"], result["cold_start_s"]) == ("1.0", None)


def test_results_of_another_machine_or_workload_are_not_mixed() -> None:
    new = report_of(Measured(VLLM, [visit_with(ttft_512_ms=1.0)]))
    for key in ("machine", "workload"):
        with pytest.raises(ValueError, match=f"{key} differs"):
            merge({**new, key: {"cores": 1000}}, new)


def test_a_file_that_is_no_report_is_an_error(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none.json") is None
    for content in ("[1]", "{}", "not json"):
        (tmp_path / "some.json").write_text(content)
        with pytest.raises(ValueError):
            read_report(tmp_path / "some.json")


RUNNER = """
import sys
import time
from visit import Job, visit

class Counter:
    distribution = "pytest"

    def __init__(self, job: Job) -> None:
        print("loading", job.options["answer"])

    def prepare(self, sequences, shared):
        pass

    def generate(self, prompts, tokens, shared=0):
        {generate}

visit(Counter)
"""
COUNT = "return [list(range(tokens)) for _ in prompts]"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    make_prompts(encode, QUICK).write(tmp_path / "prompts.json")
    return Setting(QUICK, tmp_path / "prompts.json", list(FIGURES), cores=1, limit_s=60.0, logs=tmp_path)


def visit_runner(generate: str, setting: Setting, **changes: Any) -> Visit:
    script = setting.logs / "runner.py"
    script.write_text(RUNNER.format(generate=generate))
    engine = Engine("counter", "counter", "none", str(script), None, "gguf", {"answer": 42}, **changes)
    variables = {"PYTHONPATH": str(RUNNERS)}
    return run_visit(engine, Path(sys.executable), setting.logs, variables, setting, lambda text: None)


def test_a_visit_takes_every_figure(setting: Setting) -> None:
    visit = visit_runner(COUNT, setting)
    assert visit.error is None
    assert {name: len(values) for name, values in visit.samples.items()} == {
        "cold_start_s": 1,
        "ttft_512_ms": 3,
        "decode_tokens_per_s": 2,
        "ttft_4096_ms": 1,
        "batch_output_tokens_per_s": 1,
        "batch_total_tokens_per_s": 1,
        "shared_output_tokens_per_s": 1,
    }
    assert visit.tokens == list(range(16))
    assert visit.version == pytest.__version__
    assert visit.peak_rss_mb is None or visit.peak_rss_mb > 1


def test_a_visit_leaves_out_what_the_engine_cannot_do(setting: Setting) -> None:
    visit = visit_runner(COUNT, setting, leaves_out={"decode": "it cannot", "batch": "it cannot"})
    assert not any(name.startswith(("decode", "batch")) for name in visit.samples)
    assert "shared_output_tokens_per_s" in visit.samples


def test_a_crash_is_reported_with_its_last_lines(setting: Setting) -> None:
    visit = visit_runner("sys.exit('out of luck') if len(prompts) > 1 else None; " + COUNT, setting)
    assert visit.error is not None
    assert "status 1" in visit.error
    assert "out of luck" in visit.error
    assert len(visit.samples["ttft_512_ms"]) == 3


def test_incomplete_answers_are_a_failure(setting: Setting) -> None:
    visit = visit_runner("return [list(range(min(tokens, 4))) for _ in prompts]", setting)
    assert visit.error is not None
    assert "expected 1 answers of 16 tokens" in visit.error


def test_a_visit_ends_at_its_time_limit(setting: Setting) -> None:
    visit = visit_runner("time.sleep(600)", replace(setting, limit_s=0.5))
    assert visit.error == "stopped after its time limit of 0.5 s"


def test_an_environment_without_requirements_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"nobody\.txt: No such file"):
        Environments(tmp_path, requirements=tmp_path).install("nobody", lambda text: None)


def test_an_engine_for_other_processors_is_reported(tmp_path: Path) -> None:
    entry = Measured(replace(VLLM, vendor="NobodyMakesThem"))
    environments = Environments(tmp_path)
    models = Models(ModelSource("tiny", "gguf", tmp_path / "tiny.gguf"), environments)
    assert prepare([entry], environments, models, lambda text: None) == {}
    assert entry.failure == "only for processors of NobodyMakesThem"


def test_the_folder_made_of_a_gguf_is_the_same_model(tmp_path: Path) -> None:
    from kllm import LLM, SamplingParams

    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(local_source("tiny", tmp_path / "tiny.gguf"), folder)
    answers = []
    for model in (tmp_path / "tiny.gguf", folder):
        llm = LLM(str(model), dtype="bfloat16", quantization="none", kernels="reference", threads=1, num_kv_blocks=8)
        [output] = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=8, temperature=0.0), progress=False)
        answers.append(output.outputs[0].token_ids)
        llm.close()
    assert answers[0] == answers[1]


def test_a_run_reports_the_peer_that_cannot_be_installed(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--engines", "kllm-bf16,transformers-bf16"]
    command += ["--model", str(tmp_path / "tiny.gguf"), "--cache", str(tmp_path / "cache")]
    command += ["--pip-options=--no-such-option", "--time-limit", "120"]
    command += ["--json", str(tmp_path / "peers.json"), "--plot", str(tmp_path / "peers.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "not measured: cannot be installed" in done.stdout
    report = json.loads((tmp_path / "peers.json").read_text())
    [ours] = report["results"]
    assert ours["engine"] == "kllm"
    assert all(ours[name] > 0 for name in FIELDS if name != "peak_rss_mb")
    [missing] = report["not_measured"]
    assert (missing["engine"], missing["figure"]) == ("transformers", "all")
    assert "--no-such-option" in missing["reason"]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--engines", "nobody"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no engine matches 'nobody'" in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_survive_their_file(tmp_path: Path) -> None:
    prompts = make_prompts(encode, QUICK)
    prompts.write(tmp_path / "prompts.json")
    assert Prompts(**json.loads((tmp_path / "prompts.json").read_text())) == prompts
