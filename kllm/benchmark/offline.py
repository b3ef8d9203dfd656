"""Latency and throughput of the engine alone, through the offline API: no HTTP, no text."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kllm.request import Delta, RequestOutput, SamplingParams
from kllm.workload.sample import OWN, Sample, TokenSource

if TYPE_CHECKING:
    from kllm.llm import LLM


def measure_latency(
    llm: LLM, input_len: int, output_len: int, iterations: int, source: TokenSource, warm_up: int = 1
) -> dict[str, Any]:
    """One request at a time. Medians of `iterations` different prompts, after `warm_up` more that do not count.

    ttft_ms: from the call to the first output token. decode_tokens_per_s: the tokens after it over the time they took;
    None when output_len is 1.
    """
    runs = [_one_run(llm, source.take(input_len, OWN, i), output_len) for i in range(warm_up + iterations)][warm_up:]
    rates = [rate for _, _, rate in runs if rate is not None]
    return {
        "input_len": input_len,
        "output_len": output_len,
        "iterations": iterations,
        "ttft_ms": round(median(ttft for ttft, _, _ in runs) * 1e3, 3),
        "decode_tokens_per_s": round(median(rates), 3) if rates else None,
        "e2e_ms": round(median(e2e for _, e2e, _ in runs) * 1e3, 3),
    }


def measure_throughput(
    llm: LLM, samples: Sequence[Sample], source: TokenSource, warm_up: Sequence[Sample] = ()
) -> dict[str, Any]:
    """All samples at once. peak_rss_mb is the most memory this process has held so far, in units of 10^6 bytes."""
    if warm_up:
        _generate(llm, warm_up, [source.prompt(sample) for sample in warm_up])
    prompts = [source.prompt(sample) for sample in samples]
    start = perf_counter()
    outputs = _generate(llm, samples, prompts)
    elapsed = perf_counter() - start
    prompt = sum(map(len, prompts))
    output = sum(len(choice.token_ids) for result in outputs for choice in result.outputs)
    return {
        "num_prompts": len(samples),
        "elapsed_s": round(elapsed, 3),
        "requests_per_s": round(len(samples) / elapsed, 3),
        "output_tokens_per_s": round(output / elapsed, 3),
        "total_tokens_per_s": round((prompt + output) / elapsed, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(result.num_cached_tokens for result in outputs),
        "peak_rss_mb": round(peak_rss_bytes() / 1e6, 1),
    }


def peak_rss_bytes() -> int:
    """The most resident memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _one_run(llm: LLM, prompt: list[int], output_len: int) -> tuple[float, float, float | None]:
    """(seconds to the first token, seconds in all, decode tokens per second)"""
    arrivals: list[tuple[float, int]] = []

    def note(index: int, delta: Delta) -> None:
        if delta.token_ids:
            arrivals.append((perf_counter(), len(delta.token_ids)))

    start = perf_counter()
    llm.generate([prompt], _exact(output_len), progress=False, on_delta=note)
    end = perf_counter()
    (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
    later_tokens = sum(count for _, count in arrivals) - first_tokens
    return first - start, end - start, later_tokens / (last - first) if later_tokens else None


def _generate(llm: LLM, samples: Sequence[Sample], prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, [_exact(sample.output_len) for sample in samples], progress=False)


def _exact(output_len: int) -> SamplingParams:
    """Greedy, with exactly this many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
