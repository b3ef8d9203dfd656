"""The gate on a tiny random model, and on SmolLM2 as CI runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.real_models import smollm2_or_skip
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import write_tiny_llama

from kllm.hub import resolve
from kllm.hub.gguf import GGUFFile
from kllm.request import InvalidRequest
from kllm.verification import gate
from kllm.verification.config import VerifyConfig
from kllm.verification.gate import Verification, is_quantised, verify
from kllm.verification.measurement import PARTS
from kllm.verification.report import plot, print_verification, summary, write_json
from kllm.verification.variants import EXACT, Variant

QUICK = {"quick": True, "tokens": 256, "window": 64, "threads": 1}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and positions for the needles and the answers in JSON."""
    folder = tmp_path_factory.mktemp("models") / "verified"
    return write_tiny_llama(folder, num_hidden_layers=1, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def parts() -> list[tuple[str, str]]:
    return []


@pytest.fixture(scope="module")
def stages() -> list[Verification]:
    return []


@pytest.fixture(scope="module")
def result(tiny_model: Path, parts: list[tuple[str, str]], stages: list[Verification]) -> Verification:
    config = VerifyConfig(variants=["prefix-caching", "batching", "bf16", "shipped"], **QUICK)
    return verify(str(tiny_model), config, lambda variant, part: parts.append((variant, part)), stages.append)


def test_scheduling_changes_nothing(result):
    caching, batching = result.variants[:2]
    assert (caching.status, batching.status) == ("passed", "passed")
    assert caching.figures is not None
    assert caching.figures.cached_tokens > 0
    assert caching.figures.cached_nats < 1e-4
    assert batching.figures is not None
    assert abs(batching.figures.perplexity_change) < 1e-5
    assert batching.figures.agreement > 0.99


def test_plain_is_measured_in_full(result):
    assert result.scored_tokens == 4 * 63
    assert result.plain.status == "passed"
    assert result.plain.figures is not None
    assert result.plain.figures.needles is not None
    assert result.plain.figures.structured == 1.0
    assert set(result.plain.seconds) == set(PARTS)
    assert result.text.startswith("pydoc_data.topics of Python 3.")


def test_a_number_format_changes_a_little(result):
    bf16 = result.variants[2]
    assert bf16.figures is not None
    assert 0 < bf16.figures.nats < 0.1


def test_a_variant_that_cannot_run_says_why_and_fails_when_asked_for_by_name(result):
    shipped = result.variants[3]
    assert (shipped.status, shipped.reason) == ("skipped", "the checkpoint's weights are not quantised")
    assert shipped.required
    assert not result.passed


def test_progress_names_every_part_in_order(result, parts):
    ran = ("plain", "prefix-caching", "batching", "bf16")
    assert parts == [(name, part) for name in ran for part in ("load", *PARTS)]


def test_every_outcome_is_handed_on_as_it_comes_and_nothing_passes_before_the_last(result, stages):
    names = ["prefix-caching", "batching", "bf16", "shipped"]
    assert [[outcome.name for outcome in stage.variants] for stage in stages] == [names[:i] for i in range(5)]
    assert [stage.waiting for stage in stages] == [names[i:] for i in range(5)]
    assert all(outcome.status == "passed" for outcome in stages[2].outcomes)
    assert not stages[2].passed
    assert stages[-1] == result


def test_an_outcome_as_a_line(result):
    plain, caching, *_, shipped = result.outcomes
    assert summary(plain).startswith(f"plain: passed, perplexity {plain.figures.perplexity:.6g}, needles ")
    assert "prefix-caching: passed, perplexity " in summary(caching)
    assert "0.000%, at most 0.1%), agreement 100.0%, needles " in summary(caching)
    assert summary(caching).endswith(" s")
    assert summary(shipped) == "shipped: skipped, the checkpoint's weights are not quantised"


def test_a_refused_engine_is_skipped_with_the_refusals_words(tiny_model, monkeypatch):
    too_long = Variant("too-long", "longer than the model", {"max_model_len": 4096}, EXACT, quick=True)
    monkeypatch.setattr(gate, "VARIANTS", {"too-long": too_long})
    result = verify(str(tiny_model), VerifyConfig(**QUICK))
    (outcome,) = result.variants
    assert outcome.status == "skipped"
    assert outcome.reason == "max_model_len is 4096, but the model was made for 2048 tokens"
    assert result.passed  # nobody asked for it by name


def test_numbers_beyond_a_limit_fail(tiny_model, monkeypatch):
    options = {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
    strict = Variant("strict", "bfloat16 under a hard limit", options, replace(EXACT, perplexity=1e-9), quick=True)
    monkeypatch.setattr(gate, "VARIANTS", {"strict": strict})
    result = verify(str(tiny_model), VerifyConfig(**QUICK))
    (outcome,) = result.variants
    assert outcome.status == "failed"
    assert "perplexity change" in [check.name for check in outcome.checks if not check.passed]
    assert not result.passed
    assert "; perplexity change is " in summary(outcome)
    console = Console(record=True, width=160)
    print_verification(result, console)
    assert "strict: perplexity change is " in console.export_text()


def test_a_window_that_the_model_is_too_short_for_is_an_error(tiny_model):
    with pytest.raises(InvalidRequest, match="the model's length is 2048"):
        verify(str(tiny_model), VerifyConfig(quick=True, tokens=4096, window=2048, threads=1))


def test_report_for_people(result):
    console = Console(record=True, width=160)
    print_verification(result, console)
    text = console.export_text()
    assert "252 tokens of pydoc_data.topics" in text
    assert "shipped did not run: the checkpoint's weights are not quantised" in text
    for name in ("plain", "prefix-caching", "batching", "bf16"):
        assert name in text


def test_report_for_programs(result, stages, tmp_path):
    write_json(tmp_path / "report.json", stages[1])
    assert json.loads((tmp_path / "report.json").read_text())["waiting"] == ["batching", "bf16", "shipped"]
    write_json(tmp_path / "report.json", result)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["passed"] is False
    assert data["plain"]["options"]["kernels"] == "reference"
    assert [variant["status"] for variant in data["variants"][:2]] == ["passed", "passed"]
    assert data["variants"][0]["checks"][0] == {
        "name": "perplexity change",
        "value": pytest.approx(0, abs=1e-5),
        "relation": "<=",
        "limit": 0.001,
        "passed": True,
    }


def test_report_as_a_plot(result, tmp_path):
    pytest.importorskip("matplotlib")
    plot(tmp_path / "report.png", result)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_quantised_checkpoints_are_recognised(tiny_model, tmp_path):
    assert not is_quantised(resolve(str(tiny_model)))
    for quant, expected in (("F32", False), ("Q8_0", True)):
        path = write_tiny_gguf(tmp_path / f"{quant}.gguf", quant)
        assert GGUFFile(path).tensors
        assert is_quantised(resolve(str(path))) is expected


@pytest.mark.slow
def test_smollm2_passes_the_quick_gate():
    smollm2_or_skip()
    result = verify("smollm2", VerifyConfig(quick=True))
    assert result.passed, [(o.name, o.reason, [c for c in o.checks if not c.passed]) for o in result.variants]
    assert result.plain.figures is not None
    assert result.plain.figures.needles == 1.0
    assert 5 < result.plain.figures.perplexity < 40
    assert any(outcome.status == "passed" for outcome in result.variants)
