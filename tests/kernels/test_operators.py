"""Every implementation of the operators against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_kernels import need_instruction_set
from support.reference_math import error, make_batch, naive_attention, naive_mla, shuffled_tables

from kllm.kernels import cpu
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.operators import ExpertWeights, LatentWeights, Operators, Rotation
from kllm.kernels.reference import absorbing_is_cheaper
from kllm.kernels.reference_attention import StepLayout
from kllm.kernels.registry import get_operators, use_machine
from kllm.quantization.int8_rows import to_int8

NAMES = ["reference", "invariant"] + (["cpu"] if cpu.why_not() is None else [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
MIXED_ROWS = [(0, 7), (20, 1), (16, 5), (37, 1), (0, 1), (3, 150), (170, 1)]

rows_strategy = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 5, 17, 40])), min_size=1, max_size=6)


@pytest.fixture(params=NAMES)
def ops(request: pytest.FixtureRequest) -> Operators:
    return get_operators(request.param)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 48, 32), (5, 130, 65), (33, 64, 96)])
def test_linear(ops: Operators, dtype: torch.dtype, rows: int, outs: int, ins: int) -> None:
    x, w, b = randn(0, rows, ins, dtype=dtype), randn(1, outs, ins, dtype=dtype) / ins**0.5, randn(2, outs, dtype=dtype)
    packed = ops.pack_linear(w)
    assert (packed.out_features, packed.in_features) == (outs, ins)
    expected = x.double() @ w.double().T
    assert error(ops.linear(x, packed), expected) < TOLERANCE[dtype]
    assert error(ops.linear(x, packed, b), expected + b.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 48), (300, 96), (7, 3, 33)])
def test_rms_norm(ops: Operators, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, w = randn(0, *shape, dtype=dtype), randn(1, shape[-1], dtype=dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    assert error(ops.rms_norm(x, w, 1e-5), expected) < TOLERANCE[dtype]
    sliced = randn(2, 5, 3 * shape[-1], dtype=dtype)[:, shape[-1] : 2 * shape[-1]]
    assert torch.equal(ops.rms_norm(sliced, w, 1e-5), ops.rms_norm(sliced.contiguous(), w, 1e-5))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs(ops: Operators, interleaved: bool) -> None:
    x, angle = randn(0, 5, 3, 8), randn(1, 5, 4)
    pairs = x.view(5, 3, 4, 2) if interleaved else x.view(5, 3, 2, 4).transpose(2, 3)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(5, 1, 4), angle[:, None])
    )
    expected = turned.flatten(2) if interleaved else turned.transpose(2, 3).flatten(2)
    if interleaved:
        cos = angle.cos().repeat_interleave(2, 1)
        sin = torch.stack((-angle.sin(), angle.sin()), -1).flatten(1)
    else:
        cos, sin = angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), 1)
    assert error(ops.rope(x, Rotation(cos[:, None], sin[:, None], interleaved)), expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_embedding(ops: Operators, dtype: torch.dtype) -> None:
    x = randn(0, 9, 2 * 37, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    assert error(ops.swiglu(x), gate * gate.sigmoid() * up) < TOLERANCE[dtype] * 2
    rows = randn(1, 11, 5, dtype=dtype)
    table = ops.pack_embedding(rows, rows.dtype, None)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 10, 3]), table), rows[[3, 0, 10, 3]])


def test_write_kv_touches_only_its_slots(ops: Operators) -> None:
    batch = make_batch([(3, 2), (4, 1)], 4, [[2, 1], [3, 4]])
    cache = torch.zeros(5, 4, 2, 3)
    values = randn(0, 3, 2, 3)
    ops.write_kv(cache, values, batch)
    assert torch.equal(cache[[2, 1, 4], [3, 0, 0]], values)
    assert cache.count_nonzero() == values.numel()


def test_write_kv_takes_another_type(ops: Operators) -> None:
    batch = make_batch([(3, 2)], 4, [[2, 1]])
    cache, values = torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16), randn(0, 2, 2, 8)
    ops.write_kv(cache, values, batch)
    assert torch.equal(cache[[2, 1], [3, 0]], values.bfloat16())


def gqa_case(rows: list[tuple[int, int]], heads: int, kv_heads: int, size: int, dtype: torch.dtype, block_tokens: int):
    lengths = [cached + count for cached, count in rows]
    tables = shuffled_tables(lengths, block_tokens, torch.Generator().manual_seed(5))
    batch = make_batch(rows, block_tokens, tables)
    blocks = sum(map(len, tables)) + 1
    q = randn(0, sum(count for _, count in rows), heads, size, dtype=dtype)
    k, v = (randn(s, blocks, block_tokens, kv_heads, size, dtype=dtype) for s in (1, 2))
    return q, k, v, batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (6, 1)])
def test_attention_over_mixed_rows(ops: Operators, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    q, k, v, batch = gqa_case(MIXED_ROWS, heads, kv_heads, 16, dtype, 16)
    actual = ops.attention(q, k, v, batch, 0.25)
    assert actual.dtype == dtype
    assert error(actual, naive_attention(q, k, v, batch, 0.25)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_decode_rows_only(ops: Operators, dtype: torch.dtype) -> None:
    q, k, v, batch = gqa_case([(40, 1), (44, 1), (47, 1)], 6, 2, 16, dtype, 16)
    assert len(StepLayout.of(batch).decode) == 1
    assert error(ops.attention(q, k, v, batch, 0.25), naive_attention(q, k, v, batch, 0.25)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_over_long_contexts_is_shared_out_without_changing_a_bit(dtype: torch.dtype) -> None:
    """One row of 1,300 tokens is cut into parts for the threads; among eight rows it is not."""
    need_instruction_set("avx2")
    use_machine(2)
    ops, rows = get_operators("cpu"), [(1299, 1), (520, 1), *[(700, 1)] * 6]
    q, k, v, batch = gqa_case(rows, 6, 2, 16, dtype, 16)
    together = ops.attention(q, k, v, batch, 0.25)
    assert error(together, naive_attention(q, k, v, batch, 0.25)) < TOLERANCE[dtype]
    for row, (cached, _) in enumerate(rows[:2]):
        single = make_batch([(cached, 1)], 16, [batch.tables[row].tolist()])
        assert torch.equal(ops.attention(q[row : row + 1], k, v, single, 0.25)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "block_tokens"), [(9, 3, 16), (4, 4, 5), (6, 1, 128)])
def test_attention_over_an_int8_cache(
    ops: Operators, dtype: torch.dtype, heads: int, kv_heads: int, block_tokens: int
) -> None:
    _check_int8_cache(ops, dtype, heads, kv_heads, block_tokens, 8e-3 if ops.name == "cpu" else 0)


@pytest.mark.skipif("cpu" not in NAMES, reason="needs the native operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_an_int8_cache_in_16_bits(dtype: torch.dtype) -> None:
    _check_int8_cache(get_operators("cpu", "float"), dtype, 9, 3, 16, 5e-5)


def _check_int8_cache(
    ops: Operators, dtype: torch.dtype, heads: int, kv_heads: int, block_tokens: int, rounding: float
) -> None:
    """Decode rows, chunks and both, against float64 over the values that the cache stands for. rounding: what rounded
    queries and probabilities may change, of the largest value."""
    for rows in (MIXED_ROWS, [(40, 1), (44, 1), (47, 1)], [(3, 150)]):
        q, k, v, batch = gqa_case(rows, heads, kv_heads, 16, dtype, block_tokens)
        (k, k_scales), (v, v_scales) = to_int8(k), to_int8(v * 3)
        actual = ops.attention(q, k, v, batch, 0.25, k_scales, v_scales)
        keys, values = (c.double() * s.double().unsqueeze(-1) for c, s in ((k, k_scales), (v, v_scales)))
        tolerance = max(TOLERANCE[dtype] * 3, rounding * values.abs().max().item())
        assert actual.dtype == dtype
        assert error(actual, naive_attention(q, keys, values, batch, 0.25)) < tolerance


@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_cache_of_another_type(ops: Operators, dtype: torch.dtype, cached: torch.dtype) -> None:
    q, k, v, batch = gqa_case(MIXED_ROWS, 6, 2, 16, cached, 16)
    actual = ops.attention(q.to(dtype), k, v, batch, 0.25)
    assert error(actual, naive_attention(q.to(dtype), k, v, batch, 0.25)) < TOLERANCE[torch.bfloat16]


@given(rows=rows_strategy, block_tokens=st.sampled_from([1, 5, 16]), name=st.sampled_from(NAMES))
@settings(max_examples=25, deadline=None)
def test_attention_any_rows(rows: list[tuple[int, int]], block_tokens: int, name: str) -> None:
    q, k, v, batch = gqa_case(rows, 4, 2, 8, torch.float32, block_tokens)
    actual = get_operators(name).attention(q, k, v, batch, 0.3)
    assert error(actual, naive_attention(q, k, v, batch, 0.3)) < 2e-5


def test_attention_takes_strided_queries(ops: Operators) -> None:
    q, k, v, batch = gqa_case(MIXED_ROWS, 4, 2, 8, torch.float32, 16)
    wide = torch.cat((q, q), dim=1)
    assert torch.equal(ops.attention(wide[:, :4], k, v, batch, 0.3), ops.attention(q, k, v, batch, 0.3))


def mla_case(rows: list[tuple[int, int]], dtype: torch.dtype):
    heads, nope, rope, value, rank = 3, 8, 4, 6, 16
    lengths = [cached + count for cached, count in rows]
    tables = shuffled_tables(lengths, 16, torch.Generator().manual_seed(5))
    tokens, blocks = sum(count for _, count in rows), sum(map(len, tables)) + 1
    q_nope, q_rope = randn(0, tokens, heads, nope, dtype=dtype), randn(1, tokens, heads, rope, dtype=dtype)
    cache = randn(2, blocks, 16, rank + rope, dtype=dtype)
    key, up = (randn(s, heads, d, rank, dtype=dtype) / rank**0.5 for s, d in ((3, nope), (4, value)))
    return q_nope, q_rope, cache, LatentWeights(key, up), make_batch(rows, 16, tables)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "form"),
    [("reference", "absorbed"), ("reference", "expanded"), ("reference", "auto"), ("invariant", "auto")],
)
def test_mla_forms_agree_with_the_definition(dtype: torch.dtype, name: str, form) -> None:
    q_nope, q_rope, cache, weights, batch = mla_case(MIXED_ROWS, dtype)
    expected = naive_mla(q_nope, q_rope, cache, weights.key, weights.value, batch, 0.3)
    actual = get_operators(name).mla_attention(q_nope, q_rope, cache, weights, batch, 0.3, form)
    assert error(actual, expected) < TOLERANCE[dtype]


def outside_contexts(batch: ForwardBatch, blocks: int) -> torch.Tensor:
    """bool [blocks, block_tokens]: cached tokens that no row may read; block 0, which pads tables, among them."""
    outside = torch.ones(blocks * batch.block_tokens, dtype=torch.bool)
    for row, span in enumerate(batch.spans):
        slots = batch.tables[row].repeat_interleave(batch.block_tokens) * batch.block_tokens
        slots += torch.arange(batch.block_tokens).repeat(batch.tables.shape[1])
        outside[slots[: span.context]] = False
    return outside.view(blocks, batch.block_tokens)


def with_leftovers(cache: torch.Tensor, outside: torch.Tensor, value: float) -> torch.Tensor:
    left = cache.clone()
    left[outside] = value
    return left


LEFTOVERS = pytest.mark.parametrize("leftover", [float("nan"), float("inf"), float("-inf")])
DECODE_ROWS = [(40, 1), (44, 1), (47, 1), (48, 1), (50, 1)]
BATCHES = pytest.mark.parametrize("rows", [[(2, 1)], DECODE_ROWS, MIXED_ROWS], ids=["one", "decode", "mixed"])


@LEFTOVERS
@BATCHES
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_read_what_others_left_in_the_cache(
    ops: Operators, dtype: torch.dtype, rows: list[tuple[int, int]], leftover: float
) -> None:
    """A request that overflowed leaves its blocks to the next one, which must not fail for it."""
    q, k, v, batch = gqa_case(rows, 6, 2, 16, dtype, 16)
    outside = outside_contexts(batch, len(k))
    clean, stale = ([with_leftovers(c, outside, x) for c in (k, v)] for x in (0, leftover))
    expected = ops.attention(q, *clean, batch, 0.25)
    assert expected.isfinite().all()
    assert torch.equal(ops.attention(q, *stale, batch, 0.25), expected)


@LEFTOVERS
@BATCHES
def test_attention_does_not_read_scales_that_others_left(
    ops: Operators, rows: list[tuple[int, int]], leftover: float
) -> None:
    q, k, v, batch = gqa_case(rows, 6, 2, 16, torch.float32, 16)
    outside = outside_contexts(batch, len(k))
    (k, k_scales), (v, v_scales) = to_int8(k), to_int8(v)
    clean, stale = ([with_leftovers(c, outside, x) for c in (k_scales, v_scales)] for x in (0, leftover))
    expected = ops.attention(q, k, v, batch, 0.25, *clean)
    assert expected.isfinite().all()
    assert torch.equal(ops.attention(q, k, v, batch, 0.25, *stale), expected)


@LEFTOVERS
@BATCHES
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_does_not_read_what_others_left_in_the_cache(
    ops: Operators, dtype: torch.dtype, rows: list[tuple[int, int]], leftover: float
) -> None:
    q_nope, q_rope, cache, weights, batch = mla_case(rows, dtype)
    outside = outside_contexts(batch, len(cache))
    clean, stale = (with_leftovers(cache, outside, x) for x in (0, leftover))
    expected = ops.mla_attention(q_nope, q_rope, clean, weights, batch, 0.3)
    assert expected.isfinite().all()
    assert torch.equal(ops.mla_attention(q_nope, q_rope, stale, weights, batch, 0.3), expected)


SPOILT_ROWS = [(0, 7), (20, 150), (37, 1)]  # the second is spoilt
SPOILT_POSITION = 90


def spoil(cache: torch.Tensor, batch: ForwardBatch, value: float) -> torch.Tensor:
    block = int(batch.tables[1, SPOILT_POSITION // batch.block_tokens])
    spoilt = cache.clone()
    spoilt[block, SPOILT_POSITION % batch.block_tokens] = value
    return spoilt


def check_spoilt(actual: torch.Tensor, whole: torch.Tensor, batch: ForwardBatch) -> None:
    """Nobody but the tokens from the spoilt one on has another bit."""
    first, end = batch.spans[1].start + SPOILT_POSITION - SPOILT_ROWS[1][0], batch.spans[2].start
    assert whole.isfinite().all()
    assert torch.equal(actual[:first], whole[:first])
    assert torch.equal(actual[end:], whole[end:])
    assert not actual[first:end].flatten(1).isfinite().all(1).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoilt", ["keys", "values", "both"])
def test_a_token_that_is_not_finite_spoils_no_token_before_it(ops: Operators, dtype: torch.dtype, spoilt: str) -> None:
    """The blocks before it are a prefix that other requests share: they stay in use when this request has failed."""
    q, k, v, batch = gqa_case(SPOILT_ROWS, 6, 2, 16, dtype, 16)
    whole = ops.attention(q, k, v, batch, 0.25)
    keys = k if spoilt == "values" else spoil(k, batch, float("nan"))
    values = v if spoilt == "keys" else spoil(v, batch, float("nan"))
    check_spoilt(ops.attention(q, keys, values, batch, 0.25), whole, batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "form"), [("reference", "absorbed"), ("reference", "expanded"), ("invariant", "auto")]
)
def test_a_latent_that_is_not_finite_spoils_no_token_before_it(dtype: torch.dtype, name: str, form) -> None:
    ops = get_operators(name)
    q_nope, q_rope, cache, weights, batch = mla_case(SPOILT_ROWS, dtype)
    whole = ops.mla_attention(q_nope, q_rope, cache, weights, batch, 0.3, form)
    spoilt = spoil(cache, batch, float("nan"))
    check_spoilt(ops.mla_attention(q_nope, q_rope, spoilt, weights, batch, 0.3, form), whole, batch)


def test_mla_choice_follows_cost() -> None:
    weights = LatentWeights(torch.empty(1, 128, 512), torch.empty(1, 128, 512))
    q_rope = torch.empty(1, 1, 64)
    assert absorbing_is_cheaper(1, weights, q_rope)
    assert absorbing_is_cheaper(170, weights, q_rope)
    assert not absorbing_is_cheaper(171, weights, q_rope)


def test_invariant_mla_has_one_form() -> None:
    q_nope, q_rope, cache, weights, batch = mla_case([(0, 2)], torch.float32)
    with pytest.raises(ValueError, match="absorbed"):
        get_operators("invariant").mla_attention(q_nope, q_rope, cache, weights, batch, 0.3, "expanded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe(ops: Operators, dtype: torch.dtype) -> None:
    hidden, inner, experts, k = 16, 24, 6, 3
    x = randn(0, 11, hidden, dtype=dtype)
    gate_up = [randn(10 + e, 2 * inner, hidden, dtype=dtype) / 4 for e in range(experts)]
    down = [randn(30 + e, hidden, inner, dtype=dtype) / 5 for e in range(experts)]
    indices = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:k] for t in range(11)])
    weights = randn(1, 11, k).abs()
    expected = torch.zeros(11, hidden, dtype=torch.float64)
    for token in range(11):
        for slot in range(k):
            e = int(indices[token, slot])
            gate, up = (gate_up[e].double() @ x[token].double()).chunk(2)
            expected[token] += weights[token, slot] * (down[e].double() @ (gate * gate.sigmoid() * up))
    packed = ExpertWeights(tuple(map(ops.pack_linear, gate_up)), tuple(map(ops.pack_linear, down)))
    assert error(ops.moe(x, packed, indices, weights), expected) < TOLERANCE[dtype] * 3


def test_expert_scores_are_float32(ops: Operators) -> None:
    x, gate = randn(0, 5, 16, dtype=torch.bfloat16), randn(1, 7, 16)
    scores = ops.expert_scores(x, ops.pack_linear(gate))
    assert scores.dtype == torch.float32
    assert error(scores, (x.double() @ gate.double().T).sigmoid()) < 1e-5


def test_unknown_operators_are_named() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        get_operators("fast")
    assert get_operators("auto").name == ("reference" if cpu.why_not() else "cpu")
