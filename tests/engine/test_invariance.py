"""With batch-invariant fp32 operators a request's tokens are the same bits of arithmetic however it is scheduled:
alone, in a batch, in chunks, after a prefix hit, after preemption, planned one or two steps ahead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cpu_kernels import INSTRUCTION_SETS, need_instruction_set
from support.engines import make_engine

from kllm.engine.core import EngineCore
from kllm.messages import Submit
from kllm.request import Request, SamplingParams, TokenLogprobs

Output = tuple[list[int], list[TokenLogprobs]]


def prompts(count: int, low: int, high: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(low // 2)]
    return [
        (shared if i % 4 == 0 else []) + [rng.randrange(vocab) for _ in range(rng.randrange(low, high))]
        for i in range(count)
    ]


def generate(core: EngineCore, batch: list[list[int]], params: Callable[[int], SamplingParams]) -> list[Output]:
    """All prompts at once; tokens and log-probabilities of each."""
    outputs: dict[str, Output] = {}
    for i, prompt in enumerate(batch):
        outputs[str(i)] = ([], [])
        core.add(Submit(request=Request(request_id=str(i), prompt_token_ids=prompt, params=params(i))))
    while core.num_unfinished:
        for delta in core.step():
            assert delta.error is None
            outputs[delta.request_id][0].extend(delta.token_ids)
            outputs[delta.request_id][1].extend(delta.logprobs or [])
        core.scheduler.check()
    while core.oldest is not None:
        core.step()
    return list(outputs.values())


def alone(core: EngineCore, batch: list[list[int]], params: Callable[[int], SamplingParams]) -> list[Output]:
    result = []
    for i, prompt in enumerate(batch):
        result += generate(core, [prompt], lambda _, i=i: params(i))  # type: ignore[misc]
        core.scheduler.kv.clear()
    return result


def check_invariance(model: Path | str, batch: list[list[int]], max_tokens: int, **extra: Any) -> None:
    """Every way of scheduling gives what `alone` gives, log-probabilities included."""
    base = {"dtype": "float32", "kernels": "invariant", "max_num_seqs": 16, **extra}

    def params(i: int) -> SamplingParams:
        temperature = 0.0 if i % 2 == 0 else 1.0
        return SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True, logprobs=2)

    def with_engine(run: Callable[[EngineCore], list[Output]], **options: Any) -> list[Output]:
        engine = make_engine(model, **{**base, **options})
        try:
            return run(engine.core)
        finally:
            engine.core.close()

    expected = with_engine(lambda core: alone(core, batch, params), enable_prefix_caching=False)
    together = {
        "in a batch of 16": {},
        "chunked by 16": {"prefill_chunk": 16},
        "chunked by 64": {"prefill_chunk": 64},
        "chunked by 512": {"prefill_chunk": 512, "max_num_batched_tokens": 1024},
        "two plans in flight": {"pipeline_depth": 2},
        "without a prefix cache": {"enable_prefix_caching": False},
    }
    for name, options in together.items():
        assert with_engine(lambda core: generate(core, batch, params), **options) == expected, name

    def prefix_hit(core: EngineCore) -> list[Output]:
        generate(core, batch, lambda i: SamplingParams(max_tokens=1))
        hits = core.scheduler.load().prefix_hits
        outputs = generate(core, batch, params)
        assert core.scheduler.load().prefix_hits > hits
        return outputs

    assert with_engine(prefix_hit) == expected, "prefix hit"

    def preempted(core: EngineCore) -> list[Output]:
        outputs = generate(core, batch, params)
        assert core.scheduler.num_preemptions > 0
        return outputs

    block = extra.get("block_size", 16)
    longest = max(len(prompt) for prompt in batch) + max_tokens
    for depth in (1, 2):
        few = {"num_kv_blocks": 2 * -(-longest // block), "pipeline_depth": depth}
        assert with_engine(preempted, **few) == expected, f"after preemption, depth {depth}"


def test_tiny_llama(tiny_llama_folder: Path) -> None:
    check_invariance(tiny_llama_folder, prompts(16, 20, 150, 271, seed=1), 24, block_size=8)


NATIVE: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 with float activations": {"dtype": "bfloat16", "quantization": "int8", "activations": "float"},
    "4 bit": {"dtype": "bfloat16", "quantization": "q4_1"},
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", NATIVE)
def test_native_operators(tiny_llama_folder: Path, name: str, instruction_set: str) -> None:
    """The native operators sum in one order, whatever the batch is, on every instruction set and in every format."""
    need_instruction_set(instruction_set)
    options = {"kernels": "cpu", "instruction_set": instruction_set, "threads": 2, **NATIVE[name]}
    check_invariance(tiny_llama_folder, prompts(16, 20, 150, 271, seed=1), 12, block_size=8, **options)


def test_int8_kv_cache(tiny_llama_folder: Path) -> None:
    """What is cached is quantised per token, so it does not matter with which others it was computed."""
    batch = prompts(8, 20, 150, 271, seed=3)
    check_invariance(tiny_llama_folder, batch, 12, block_size=8, kv_cache_dtype="int8")


@pytest.mark.slow
def test_smollm2() -> None:
    """32 prompts, 128 tokens each, half of them greedy."""
    check_invariance("smollm2", prompts(32, 16, 140, 49152, seed=2), 128, threads=None)
