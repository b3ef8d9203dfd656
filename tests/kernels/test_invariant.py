"""The invariant operators' promise: a row's bits do not depend on anything but the row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_math import make_batch, shuffled_tables

from kllm.kernels.invariant import InvariantOperators
from kllm.kernels.operators import ExpertWeights, LatentWeights

OPS = InvariantOperators()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_agree(function: Any, x: torch.Tensor) -> None:
    """Every row alone, and every split in two, gives the bits of the whole."""
    whole = function(x)
    assert whole.isfinite().all()
    for row in range(x.shape[0]):
        assert torch.equal(function(x[row : row + 1]), whole[row : row + 1])
    for cut in range(1, x.shape[0], 7):
        assert torch.equal(torch.cat((function(x[:cut]), function(x[cut:]))), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "ins"), [(192, 64), (960, 576), (576, 1536), (50, 37)])
def test_linear(dtype: torch.dtype, outs: int, ins: int) -> None:
    weight, bias = OPS.pack_linear(randn(0, outs, ins, dtype=dtype)), randn(1, outs, dtype=dtype)
    rows_agree(lambda x: OPS.linear(x, weight, bias), randn(2, 37, ins, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 64, 33])
def test_element_wise(dtype: torch.dtype, size: int) -> None:
    weight = randn(0, size, dtype=dtype)
    x = randn(1, 70, size, dtype=dtype)
    rows_agree(lambda x: OPS.rms_norm(x, weight, 1e-5), x)
    rows_agree(lambda x: OPS.rms_norm(x.view(-1, 3, size // 3), weight[: size // 3], 1e-5), x[:, : size // 3 * 3])
    rows_agree(OPS.swiglu, randn(2, 70, 2 * size, dtype=dtype))


def test_experts() -> None:
    experts, hidden, inner = 7, 40, 24
    gate = OPS.pack_linear(randn(0, experts, hidden))
    weights = ExpertWeights(
        tuple(OPS.pack_linear(randn(10 + e, 2 * inner, hidden)) for e in range(experts)),
        tuple(OPS.pack_linear(randn(30 + e, hidden, inner)) for e in range(experts)),
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        scores = OPS.expert_scores(x, gate)
        best = scores.topk(3)
        return torch.cat((scores, OPS.moe(x, weights, best.indices, best.values)), dim=1)

    rows_agree(function, randn(1, 40, hidden))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Row lengths, and steps that compute them: counts per row and step, in any mixture."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    left = list(lengths)
    steps = []
    while any(left):
        counts = [draw(st.integers(0, n)) if n else 0 for n in left]
        if not any(counts):
            counts = list(left)
        left = [n - count for n, count in zip(left, counts, strict=True)]
        steps.append(counts)
    return lengths, steps


class Attention:
    """Rows' queries and cache entries are a function of the row, so that rows can be run in any schedule."""

    def __init__(self, dtype: torch.dtype, latent: bool) -> None:
        self.dtype, self.latent = dtype, latent
        self.weights = LatentWeights(randn(91, 3, 8, 16, dtype=dtype), randn(92, 3, 6, 16, dtype=dtype))

    def step(self, rows: list[tuple[int, int]], ids: list[int], block_tokens: int, seed: int) -> list[torch.Tensor]:
        lengths = [cached + count for cached, count in rows]
        tables = shuffled_tables(lengths, block_tokens, torch.Generator().manual_seed(seed))
        batch = make_batch(rows, block_tokens, tables)
        blocks = sum(map(len, tables)) + 1
        entry = (20,) if self.latent else (2, 8)
        caches = [randn(seed + i, blocks, block_tokens, *entry, dtype=self.dtype) for i in range(2)]
        for row, table in zip(ids, tables, strict=True):
            for cache, offset in zip(caches, (0, 1000), strict=True):
                own = randn(offset + row, 150, *entry, dtype=self.dtype)[: lengths[ids.index(row)]]
                slots = torch.tensor(table).repeat_interleave(block_tokens) * block_tokens
                slots = (slots + torch.arange(block_tokens).repeat(len(table)))[: own.shape[0]]
                cache.view(-1, *entry)[slots] = own
        size = 12 if self.latent else 8
        heads = 3 if self.latent else 6
        queries = [randn(2000 + row, 150, heads, size, dtype=self.dtype) for row in ids]
        q = torch.cat([x[cached : cached + count] for x, (cached, count) in zip(queries, rows, strict=True)])
        if self.latent:
            out = OPS.mla_attention(q[..., :8], q[..., 8:], caches[0], self.weights, batch, 0.3)
        else:
            out = OPS.attention(q, caches[0], caches[1], batch, 0.3)
        return [out[span.start : span.start + span.count] for span in batch.spans]


@pytest.mark.parametrize("latent", [False, True])
@given(schedule=schedules(), dtype=st.sampled_from(DTYPES), block_tokens=st.sampled_from([1, 7, 16]))
@settings(max_examples=15, deadline=None)
def test_attention_in_any_schedule(
    latent: bool, schedule: tuple[list[int], list[list[int]]], dtype: torch.dtype, block_tokens: int
) -> None:
    lengths, steps = schedule
    attention = Attention(dtype, latent)
    alone = [attention.step([(0, length)], [row], 16, 50)[0] for row, length in enumerate(lengths)]
    done = [0] * len(lengths)
    for number, counts in enumerate(steps):
        ids = [row for row, count in enumerate(counts) if count]
        results = attention.step([(done[row], counts[row]) for row in ids], ids, block_tokens, 60 + number)
        for row, result in zip(ids, results, strict=True):
            assert torch.equal(result, alone[row][done[row] : done[row] + counts[row]])
            done[row] += counts[row]
