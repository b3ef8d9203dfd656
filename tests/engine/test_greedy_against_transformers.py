"""Greedy tokens of SmolLM2 in fp32 against transformers: 32 prompts of English text, 128 tokens each.

Two right implementations differ by rounding, so a token counts only where the reference's best logit leads the second
by more than twice the measured logit error; after a difference within that error a sequence is not compared further.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.real_models import smollm2_or_skip

from kllm.kernels import cpu
from kllm.llm import LLM
from kllm.request import SamplingParams

pytestmark = pytest.mark.oracle

PROMPTS, TOKENS = 32, 128
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Slices of an English text, of four lengths (the reference runs those of one length together)."""
    from kllm.tokenization.tokenizer import load_tokenizer

    ids = load_tokenizer(smollm2_or_skip()).encode(TEXT.read_text())
    lengths = [(17, 45, 90, 140)[i % 4] for i in range(PROMPTS)]
    starts = [(i * 53) % (len(ids) - max(lengths)) for i in range(PROMPTS)]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(
    prompts: list[list[int]], transformers_reference: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], list[float]]]:
    """(tokens, lead of the best logit over the second) of each prompt."""
    folder = tmp_path_factory.mktemp("greedy")
    job = {"model": str(smollm2_or_skip().path), "dtype": "float32", "max_tokens": TOKENS, "prompts": prompts}
    (folder / "job.json").write_text(json.dumps(job))
    transformers_reference("generate", folder / "job.json", folder / "tokens.json")
    sequences = json.loads((folder / "tokens.json").read_text())["sequences"]
    return [(sequence["tokens"], sequence["gaps"]) for sequence in sequences]


@pytest.fixture(scope="module")
def logit_error(
    prompts: list[list[int]], transformers_reference: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> float:
    """Largest difference of a log-probability, over the best 20 of every position of eight prompts."""
    folder = tmp_path_factory.mktemp("logits")
    sample = prompts[::4]
    job = {"model": str(smollm2_or_skip().path), "dtype": "float32", "prompts": sample}
    (folder / "job.json").write_text(json.dumps(job))
    transformers_reference("logits", folder / "job.json", folder / "logits.safetensors")
    reference = load_file(folder / "logits.safetensors")
    llm = LLM("smollm2", dtype="float32", num_kv_blocks=256)
    outputs = llm.generate(sample, SamplingParams(max_tokens=1, prompt_logprobs=20), progress=False)
    llm.close()
    worst = 0.0
    for i, output in enumerate(outputs):
        logprobs = torch.log_softmax(reference[str(i)], dim=-1)
        for position, entry in enumerate((output.prompt_logprobs or [])[1:]):
            assert entry is not None
            for token, logprob in entry.top:
                worst = max(worst, abs(logprob - float(logprobs[position, token])))
    return worst


@pytest.mark.parametrize("kernels", ["reference", "invariant", "cpu"])
def test_greedy_tokens(
    prompts: list[list[int]], expected: list[tuple[list[int], list[float]]], logit_error: float, kernels: str
) -> None:
    assert logit_error < 1e-3
    if kernels == "cpu" and cpu.why_not() is not None:
        pytest.skip(f"no native operators: {cpu.why_not()}")
    llm = LLM("smollm2", dtype="float32", kernels=kernels, num_kv_blocks=2048)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    llm.close()
    compared = 0
    for output, (tokens, gaps) in zip(outputs, expected, strict=True):
        got = output.outputs[0].token_ids
        assert len(got) == TOKENS
        first = next((i for i in range(TOKENS) if got[i] != tokens[i]), TOKENS)
        assert first == TOKENS or gaps[first] <= 2 * logit_error, f"token {first}: lead {gaps[first]}"
        compared += first
    assert compared > 0.97 * PROMPTS * TOKENS
