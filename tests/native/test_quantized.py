"""native/: packing, dequantisation, preparation of activations and products of quantised weights, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.native_probe import FLAGS, load_probe
from support.quantized_probe import BLOCK_TYPES, Prepared, Probe, Weights

FORMATS = ["int8", *BLOCK_TYPES]


@pytest.fixture(scope="session", params=FLAGS)
def probe(request: pytest.FixtureRequest) -> Probe:
    source = Path(__file__).parent / "quantized_probe.cpp"
    return Probe(load_probe(request.config, source, ["matrix.cpp"], request.param))


def columns(format_name: str) -> int:
    return 512 if format_name.endswith("_k") else 96


def random_rows(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, cols)) * rng.uniform(0.1, 10, (rows, 1))).astype(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().view(torch.uint16).numpy()


def from_bf16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).view(torch.bfloat16).double().numpy()


def product(x: Prepared, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of what is added, by size: what an error is to be compared with."""
    rows = x.floats()[:, : weights.cols]
    exact = weights.floats.astype(np.float64).T
    return rows @ exact, np.abs(rows) @ np.abs(exact)


# -- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format_name", BLOCK_TYPES)
def test_packed_blocks_keep_their_values(probe: Probe, format_name: str, gated: bool) -> None:
    weights = Weights(probe, format_name, 74, columns(format_name), gated)
    assert np.array_equal(weights.read_rows(), weights.floats)
    assert np.array_equal(weights.dequantized()[0], weights.floats)


@pytest.mark.parametrize("format_name", ["float32", "bfloat16", *FORMATS])
def test_a_dequantized_panel_is_what_its_rows_are(probe: Probe, format_name: str) -> None:
    cols = columns(format_name) - (0 if format_name in BLOCK_TYPES else 3)
    weights = Weights(probe, format_name, 37, cols, gated=False)
    floats, halves = weights.dequantized()
    assert np.array_equal(floats[:, :cols], weights.read_rows())
    assert not floats[:, cols:].any()
    assert np.array_equal(halves, bf16_bits(floats))


def test_int8_rows_are_rounded_to_their_own_scale(probe: Probe) -> None:
    weights = Weights(probe, "int8", 20, 64, gated=False, seed=3)
    values = np.random.default_rng(3).standard_normal((20, 64)).astype(np.float32)
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(weights.floats - values) <= steps * 0.5001).all()


def test_super_blocks_need_whole_super_blocks(probe: Probe) -> None:
    assert probe.library.weights_new(b"q4_k", 16, 288, 0) is None


# -- activations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [32, 96, 100, 17, 576])
@pytest.mark.parametrize("normed", [False, True])
def test_prepared_rows(probe: Probe, cols: int, normed: bool) -> None:
    whole = random_rows(5, cols + 7)
    x = whole[:, :cols]  # rows further apart than they are long
    norm = random_rows(1, cols, seed=2)[0] if normed else None
    exact = x.astype(np.float64)
    if norm is not None:
        exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * norm
    floats = probe.prepare(x, "float32", norm)
    np.testing.assert_allclose(floats[:, :cols], exact, rtol=1e-6)
    assert np.array_equal(probe.prepare(x, "bfloat16", norm), bf16_bits(floats))
    assert not floats[:, cols:].any()
    prepared = probe.prepare(x, "int8", norm)
    groups = floats.reshape(5, -1, 32)
    assert np.array_equal(prepared.scales, np.abs(groups).max(axis=2) / np.float32(127))
    assert np.array_equal(prepared.sums, prepared.values.reshape(groups.shape).sum(axis=2, dtype=np.int32))
    steps = np.repeat(prepared.scales, 32, axis=1)
    assert (np.abs(prepared.floats() - floats) <= steps * 0.50001).all()
    assert np.abs(prepared.values.astype(int)).max() <= 127


def test_halves_are_rounded_to_even(probe: Probe) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert probe.prepare(x, "int8").values[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_zero_rows_stay_zero(probe: Probe) -> None:
    prepared = probe.prepare(np.zeros((2, 64), np.float32), "int8", np.ones(64, np.float32))
    assert not any(part.any() for part in (prepared.values, prepared.scales, prepared.sums))


# -- products -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 13])
def test_product(probe: Probe, format_name: str, rows: int) -> None:
    weights = Weights(probe, format_name, 16 * 9 + 5, columns(format_name), gated=False)
    x = probe.prepare(random_rows(rows, weights.cols), "int8")
    y, _ = weights.multiply(x)
    exact, size = product(x, weights)
    assert (np.abs(y - exact) <= 2e-6 * size).all()


def test_product_of_columns_that_are_no_whole_block(probe: Probe) -> None:
    weights = Weights(probe, "int8", 33, 75, gated=False)
    x = probe.prepare(random_rows(3, 75), "int8")
    exact, size = product(x, weights)
    assert (np.abs(weights.multiply(x)[0] - exact) <= 2e-6 * size).all()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_gated_product(probe: Probe, format_name: str, kind: str) -> None:
    weights = Weights(probe, format_name, 2 * (16 * 5 + 3), columns(format_name), gated=True)
    x = probe.prepare(random_rows(7, weights.cols) / 10, "int8")
    bias = random_rows(1, weights.rows, seed=5)[0]
    exact, size = product(x, weights)
    gate, up = np.split(exact + bias, 2, axis=1)
    expected = gate / (1 + np.exp(np.minimum(-gate, 700))) * up
    y = np.zeros(expected.shape, np.uint16 if kind == "bfloat16" else np.float32)
    weights.multiply(x, "gated", y, bias)
    room = 4e-6 * np.maximum(size[:, : gate.shape[1]], size[:, gate.shape[1] :]) * (1 + np.abs(up) + np.abs(gate))
    if kind == "bfloat16":
        room = room + np.abs(expected) / 256
    assert (np.abs((from_bf16_bits(y) if kind == "bfloat16" else y) - expected) <= room).all()


@pytest.mark.parametrize("store", ["set", "add"])
def test_bias_and_residual(probe: Probe, store: str) -> None:
    weights = Weights(probe, "q8_0", 45, 64, gated=False)
    x = probe.prepare(random_rows(5, 64), "int8")
    bias, y = random_rows(1, 45, seed=5)[0], random_rows(5, 50, seed=6)
    before = y.copy()
    weights.multiply(x, store, y[:, :45], bias)
    exact, size = product(x, weights)
    expected = exact + bias + (before[:, :45] if store == "add" else 0)
    assert (np.abs(y[:, :45] - expected) <= 2e-6 * size + 1e-6 * np.abs(before[:, :45])).all()
    assert np.array_equal(y[:, 45:], before[:, 45:])


@pytest.mark.parametrize("format_name", FORMATS)
def test_extreme_numbers_do_not_overflow(probe: Probe, format_name: str) -> None:
    """All activations at 127 or -127, so that the products of one row have the same sign."""
    weights = Weights(probe, format_name, 64, 512, gated=False, seed=9)
    signs = np.where(weights.floats[:4] > 0, 1, -1)  # rows that meet their own weights with the same sign
    x = probe.prepare(signs.astype(np.float32), "int8")
    assert (np.abs(x.values) == 127).all()
    exact, size = product(x, weights)
    assert (np.abs(weights.multiply(x)[0] - exact) <= 2e-6 * size).all()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_any_task(probe: Probe, format_name: str) -> None:
    weights = Weights(probe, format_name, 16 * 11 + 1, columns(format_name), gated=False)
    x = random_rows(21, weights.cols)
    whole, _ = weights.multiply(probe.prepare(x, "int8"))
    for first, count in [(0, 1), (4, 2), (20, 1), (3, 5), (10, 11), (0, 9)]:
        part, _ = weights.multiply(probe.prepare(x[first : first + count], "int8"))
        assert np.array_equal(part, whole[first : first + count])
    pieces = np.full_like(whole, np.nan)
    prepared = probe.prepare(x, "int8")
    for rows in [(0, 8), (8, 9), (9, 21)]:
        for panels in [(0, 1), (1, 4), (4, 11), (11, 12)]:
            weights.multiply(prepared, "set", pieces, rows=rows, panels=panels)
    assert np.array_equal(pieces, whole)
