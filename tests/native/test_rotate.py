from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support.native_attention import BF16, F32, I8, Floats, RotateTask, address, empty_cache, from_bf16, to_bf16

POSITIONS = 50
EPS = 1e-5


def tables(head_dim: int) -> tuple[Floats, Floats]:
    """cos and sin [positions, head_dim] of half-split pairs, the sign of sin included."""
    angles = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(head_dim // 2)[None, :] * 2 / head_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.hstack([cos, cos]).astype(np.float32), np.hstack([-sin, sin]).astype(np.float32)


def turned(x: Floats, norm: Floats | None, cos: Floats, sin: Floats) -> np.ndarray:
    """x [tokens, heads, head_dim] in float64, cos and sin [tokens, head_dim]."""
    y = x.astype(np.float64)
    if norm is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * norm
    half = x.shape[-1] // 2
    swapped = np.concatenate([y[..., half:], y[..., :half]], -1)
    result: np.ndarray = y * cos[:, None] + swapped * sin[:, None]
    return result


@pytest.mark.parametrize("kind", [F32, BF16, I8], ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 16, 30, 64, 80, 128])
def test_matches_float64(attention_library: ctypes.CDLL, kind: int, normed: bool, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    tokens, heads, kv_heads, first = 7, 6, 2, 2
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim), np.float32)
    qkv[3, heads + kv_heads] = 0.0  # a value vector of zeros
    before = qkv.copy()
    cos, sin = tables(head_dim)
    positions = rng.integers(0, POSITIONS, tokens)
    slots = rng.permutation(15)[:tokens]
    norms = [rng.standard_normal(head_dim, np.float32) if normed else None for _ in range(2)]
    caches = [empty_cache(kind, (15, kv_heads, head_dim)) for _ in range(2)]
    scales = [np.full((15, kv_heads), np.nan, np.float32) for _ in range(2)]
    task = RotateTask(
        qkv=address(qkv),
        stride=qkv[0].size,
        cos=address(cos),
        sin=address(sin),
        positions=address(positions),
        slots=address(slots),
        q_norm=address(norms[0]),
        k_norm=address(norms[1]),
        eps=EPS,
        k_cache=address(caches[0]),
        v_cache=address(caches[1]),
        k_scales=address(scales[0]) if kind == I8 else None,
        v_scales=address(scales[1]) if kind == I8 else None,
        cache_type=kind,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        row=first,
        row_end=tokens,
    )
    attention_library.rotate(ctypes.byref(task))

    np.testing.assert_array_equal(qkv[:first], before[:first])
    np.testing.assert_array_equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])
    q = turned(before[first:, :heads], norms[0], cos[positions[first:]], sin[positions[first:]])
    k = turned(before[first:, heads : heads + kv_heads], norms[1], cos[positions[first:]], sin[positions[first:]])
    np.testing.assert_allclose(qkv[first:, :heads], q, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(qkv[first:, heads : heads + kv_heads], k, rtol=1e-5, atol=2e-6)
    entries = (qkv[first:, heads : heads + kv_heads], before[first:, heads + kv_heads :])
    for values, cache, scale in zip(entries, caches, scales, strict=True):
        check_entries(kind, values, cache[slots[first:]], scale[slots[first:]])
        untouched = np.setdiff1d(np.arange(15), slots[first:])
        np.testing.assert_array_equal(cache[untouched], empty_cache(kind, cache.shape)[untouched])


def check_entries(kind: int, values: Floats, entries: np.ndarray, scales: Floats) -> None:
    if kind == F32:
        np.testing.assert_array_equal(entries, values)
    elif kind == BF16:
        np.testing.assert_array_equal(entries, to_bf16(values))
        assert np.abs(from_bf16(entries) - values).max() <= np.abs(values).max() / 256
    else:
        peak = np.abs(values).max(-1)
        np.testing.assert_allclose(scales, peak / 127, rtol=1e-6)
        assert (np.abs(entries) <= 127).all()
        error = np.abs(entries * scales[..., None] - values)
        assert (error <= scales[..., None] * 0.5001).all()
