"""The bound of an infinite cache against one that compares tokens, and against the figures of the public traces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.workload.replay import trace_samples
from kllm.workload.reuse import infinite_cache_hits
from kllm.workload.sample import BLOCK, OWN, Sample, TokenSource
from kllm.workload.traces import read_trace

runs = st.tuples(st.tuples(st.just(BLOCK), st.integers(0, 3)), st.integers(1, 12))
prompts = st.lists(st.lists(runs, min_size=1, max_size=5), max_size=8)


@given(prompts, st.integers(1, 7))
def test_it_is_what_comparing_tokens_gives(parts: list, block_tokens: int) -> None:
    samples = [Sample(tuple(prompt), 1) for prompt in parts]
    source = TokenSource(0, 1 << 20)
    blocks: set[tuple[int, ...]] = set()
    hits = tokens = 0
    for sample in samples:
        prompt = source.prompt(sample)
        ends = range(block_tokens, len(prompt), block_tokens)
        hits += block_tokens * next((i for i, end in enumerate(ends) if tuple(prompt[:end]) not in blocks), len(ends))
        tokens += len(prompt)
        blocks |= {tuple(prompt[:end]) for end in range(block_tokens, len(prompt) + 1, block_tokens)}
    assert infinite_cache_hits(samples, block_tokens) == (hits, tokens)


def test_the_last_token_is_always_computed() -> None:
    prompt = Sample((((OWN, 0), 8),), 1)
    assert infinite_cache_hits([prompt, prompt], 4) == (4, 16)


@pytest.mark.parametrize(("trace", "reuse"), [("mooncake-conversation", 0.374), ("mooncake-synthetic", 0.651)])
def test_the_traces_have_the_reuse_that_they_are_known_for(trace: str, reuse: float) -> None:
    """Their figures count a part of a block at a prompt's end too."""
    hits, tokens = infinite_cache_hits(trace_samples(read_trace(trace)), 512)
    assert hits / tokens == pytest.approx(reuse, abs=0.01)
