from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support.native_attention import BF16, EXACT_I8, F32, I8, Case

# Of the largest value: float32 throughout; bfloat16 probabilities; int8 entries are exact, q and probabilities are not.
# As one byte a probability is up to 1 / 510 of the tile's largest off, at random: 300 of them add up to under 2 %.
TOLERANCE = {F32: 3e-6, BF16: 4e-3, I8: 2e-2, EXACT_I8: 4e-4}
KINDS = pytest.mark.parametrize("kind", TOLERANCE, ids=["float32", "bfloat16", "int8", "int8, two bytes"])


def random_case(rng: np.random.Generator, kind: int) -> Case:
    context = int(rng.integers(1, 301))
    return Case(
        rng,
        kind,
        head_dim=int(rng.choice([1, 2, 7, 16, 31, 32, 48, 64, 80, 96, 128, 130])),
        group=int(rng.integers(1, 9)),
        kv_heads=int(rng.integers(1, 4)),
        block_tokens=int(rng.choice([1, 3, 16, 17, 32])),
        context=context,
        queries=int(rng.integers(1, min(context, 70) + 1)),
        spread=float(rng.choice([0.1, 1.0, 6.0])),
    )


@KINDS
@pytest.mark.parametrize("seed", range(12))
def test_matches_float64(attention_library: ctypes.CDLL, kind: int, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), kind)
    expected = case.expected()
    error = np.abs(case.attend(attention_library, chunk=64) - expected).max()
    assert error < TOLERANCE[kind] * max(1.0, case.spread) * max(1.0, np.abs(expected).max())


def test_q_is_rounded_to_bytes(attention_library: ctypes.CDLL) -> None:
    if not attention_library.rounds_to_bytes():
        pytest.skip("without AVX-512 products with an int8 cache are of floats")
    case = Case(np.random.default_rng(3), I8, head_dim=64, group=3, kv_heads=2, block_tokens=16, context=200, queries=9)
    of_rounded = case.attend(attention_library, 9)
    peak = np.abs(case.q).max(-1, keepdims=True)
    less_than_half_a_step = case.rng.uniform(-peak / 381, peak / 381, case.q.shape)
    case.q += less_than_half_a_step * (np.abs(case.q) < 0.99 * peak)
    np.testing.assert_array_equal(case.attend(attention_library, 9), of_rounded)


@KINDS
@pytest.mark.parametrize("seed", range(100, 106))
def test_same_bits_in_any_chunk(attention_library: ctypes.CDLL, kind: int, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), kind)
    whole = case.attend(attention_library, chunk=case.queries)
    for chunk, heads in ((1, 1), (7, 1), (1, 2), (7, 3)):
        np.testing.assert_array_equal(case.attend(attention_library, chunk, heads), whole)


@KINDS
def test_same_bits_across_parts_and_passes(attention_library: ctypes.CDLL, kind: int) -> None:
    """More rows than one pass takes, over the edge between two parts of the context."""
    rng = np.random.default_rng(5)
    case = Case(rng, kind, head_dim=32, group=5, kv_heads=2, block_tokens=16, context=540, queries=90)
    whole = case.attend(attention_library, chunk=90)
    assert np.abs(whole - case.expected()).max() < TOLERANCE[kind] * 4
    np.testing.assert_array_equal(case.attend(attention_library, chunk=1), whole)
    np.testing.assert_array_equal(case.attend_in_parts(attention_library), whole[-1])


@KINDS
@pytest.mark.parametrize("context", [1, 255, 256, 257, 513, 1300])
def test_parts_give_the_same_bits(attention_library: ctypes.CDLL, kind: int, context: int) -> None:
    rng = np.random.default_rng(context)
    case = Case(rng, kind, head_dim=64, group=3, kv_heads=3, block_tokens=16, context=context, queries=1)
    for heads in (1, 2, 3):
        in_parts = case.attend_in_parts(attention_library, heads)
        np.testing.assert_array_equal(in_parts, case.attend(attention_library, 1, heads)[-1])


@KINDS
def test_one_key_returns_its_value(attention_library: ctypes.CDLL, kind: int) -> None:
    case = Case(
        np.random.default_rng(1),
        kind,
        head_dim=16,
        group=2,
        kv_heads=1,
        block_tokens=4,
        context=1,
        queries=1,
        spread=50,
    )
    np.testing.assert_allclose(case.attend(attention_library, 1), case.expected(), rtol=1e-4, atol=1e-4)


@KINDS
@pytest.mark.parametrize("spread", [1e4, 1e6])
def test_large_scores_do_not_overflow(attention_library: ctypes.CDLL, kind: int, spread: float) -> None:
    case = Case(
        np.random.default_rng(2),
        kind,
        head_dim=64,
        group=3,
        kv_heads=1,
        block_tokens=16,
        context=200,
        queries=9,
        spread=spread,
    )
    assert np.abs(case.attend(attention_library, 9) - case.expected()).max() < 2e-2


@pytest.mark.parametrize("kind", [I8, EXACT_I8], ids=["one byte", "two bytes"])
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_value_that_is_not_finite_spoils_no_query_before_it(
    attention_library: ctypes.CDLL, kind: int, scale: float
) -> None:
    if not attention_library.rounds_to_bytes():
        pytest.skip("without AVX-512 products with an int8 cache are of floats")
    case = Case(
        np.random.default_rng(4), kind, head_dim=64, group=1, kv_heads=1, block_tokens=16, context=75, queries=9
    )
    clean = case.attend(attention_library, 9)
    assert case.v_scales is not None
    case.v_scales[case.table[70 // 16], 70 % 16] = scale
    spoilt = case.attend(attention_library, 9)
    np.testing.assert_array_equal(spoilt[:4], clean[:4])
    assert np.isnan(spoilt[4:]).all()


@pytest.mark.parametrize("group", [1, 3])
def test_values_that_are_not_finite_in_tiles(attention_library: ctypes.CDLL, group: int) -> None:
    """Sixteen rows meet them together, and only those that see them are spoilt."""
    if not attention_library.by_tiles():
        pytest.skip("without AMX there are no tiles")
    case = Case(
        np.random.default_rng(4), BF16, head_dim=64, group=group, kv_heads=2, block_tokens=16, context=75, queries=40
    )
    clean = case.attend(attention_library, 40)
    where = case.table[70 // 16], 70 % 16
    for cache, bits in ((case.v, 0x7FC0), (case.v, 0x7F80), (case.k, 0x7FC0)):
        before = cache[where].copy()
        cache[where][..., 5] = bits
        spoilt = case.attend(attention_library, 40)
        np.testing.assert_array_equal(spoilt[:35], clean[:35])
        assert not np.isfinite(spoilt[35:]).all(-1).any()
        cache[where] = before
