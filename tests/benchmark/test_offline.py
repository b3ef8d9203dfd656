"""The offline benchmarks on a tiny model: every token is made, and the figures fit together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kllm.benchmark.offline import measure_latency, measure_throughput, peak_rss_bytes
from kllm.llm import LLM
from kllm.workload.generators import random_samples, shared_prefix_samples
from kllm.workload.sample import TokenSource


@pytest.fixture(scope="module")
def llm(tiny_llama_folder: Path) -> Iterator[LLM]:
    with closing(LLM(str(tiny_llama_folder), num_kv_blocks=200, threads=1)) as llm:
        yield llm


@pytest.fixture
def source() -> TokenSource:
    return TokenSource(0, 270)


def test_latency(llm, source):
    figures = measure_latency(llm, input_len=20, output_len=10, iterations=3, source=source)
    assert figures["ttft_ms"] > 0
    assert figures["e2e_ms"] >= figures["ttft_ms"]
    assert figures["decode_tokens_per_s"] > 0


def test_latency_of_one_token_has_no_decode_rate(llm, source):
    assert measure_latency(llm, 20, 1, 1, source)["decode_tokens_per_s"] is None


def test_throughput_counts_every_token(llm, source):
    samples = random_samples(12, 30, 8)
    figures = measure_throughput(llm, samples, source, warm_up=samples[:1])
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (360, 96)
    rounding = 0.0005 / figures["elapsed_s"]  # elapsed_s has three decimals
    assert figures["output_tokens_per_s"] == pytest.approx(96 / figures["elapsed_s"], rel=rounding + 0.01)
    assert figures["total_tokens_per_s"] == pytest.approx(figures["output_tokens_per_s"] * 456 / 96, rel=0.01)
    assert 0 < figures["peak_rss_mb"] <= round(peak_rss_bytes() / 1e6, 1)


def test_shared_prefixes_are_found_in_the_cache(llm, source):
    samples = shared_prefix_samples(4, 1, 64, 8, 2)
    measure_throughput(llm, samples[:1], source)
    assert measure_throughput(llm, samples[1:], source)["cached_tokens"] == 3 * 64
