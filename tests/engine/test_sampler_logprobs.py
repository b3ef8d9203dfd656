"""Log-probabilities against a plain sort in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.engine.sampler import logprobs as module
from kllm.engine.sampler.logprobs import NonFiniteLogits, prompt_logprobs


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 30),
    num_top=st.integers(0, 20),
    vocab_size=st.sampled_from([3, 50, 301]),
    grid=st.sampled_from([0.0, 1.0]),
    numbers=st.integers(0, 2**32 - 1),
)
def test_ranks_and_tops(n, num_top, vocab_size, grid, numbers):
    rng = np.random.default_rng(numbers)
    logits = (rng.standard_normal((n, vocab_size)) * 2).astype(np.float32)
    if grid:
        logits = np.round(logits)  # many ties
    tokens = rng.integers(0, vocab_size, n).tolist()
    given_logits = torch.from_numpy(logits)
    entries = prompt_logprobs(given_logits, tokens, num_top)
    assert len(entries) == n
    rows = torch.log_softmax(given_logits, -1).tolist()
    for row, token, entry in zip(rows, tokens, entries, strict=True):
        assert entry.token_id == token
        assert entry.logprob == row[token]
        assert entry.rank == sum(value >= row[token] for value in row)
        best = sorted(range(vocab_size), key=lambda t: (-row[t], t))[:num_top]
        assert entry.top == tuple((t, row[t]) for t in best)


def test_slices_change_nothing(monkeypatch):
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((23, 40)).astype(np.float32))
    tokens = [i % 40 for i in range(23)]
    whole = prompt_logprobs(logits, tokens, 4)
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 200)
    assert prompt_logprobs(logits, tokens, 4) == whole


def test_bad_input_is_refused():
    with pytest.raises(NonFiniteLogits):
        prompt_logprobs(torch.tensor([[0.0, float("nan")]]), [0], 1)
    with pytest.raises(ValueError, match="1 rows of logits but 2 tokens"):
        prompt_logprobs(torch.zeros(1, 4), [0, 1], 1)
