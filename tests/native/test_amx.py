"""native/gemm_amx.h over emulated tiles and, where the processor has them, real ones: against float64, against AVX-512,
and what decides whether AMX is used."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_kernels import need_instruction_set
from support.native_probe import FLAGS, NATIVE, load_probe
from support.quantized_probe import BLOCK_TYPES, STORES, TYPES, Prepared, Probe, Weights, pointer

QUANTISED = ["int8", *BLOCK_TYPES]
FORMATS = ["bfloat16", *QUANTISED]
ROOM = 1e-6  # of the sum of sizes: float32 sums of at most 544 products


@pytest.fixture(scope="session", params=["avx512_bf16", "amx"], ids=["emulated", "real"])
def probe(request: pytest.FixtureRequest) -> Probe:
    source = Path(__file__).parent / "amx_probe.cpp"
    library = load_probe(request.config, source, ["matrix.cpp", "tile_check.cpp"], request.param)
    if request.param == "amx" and not library.may_use_tiles():
        pytest.skip("the system does not lend the registers of AMX")
    return Probe(library)


def columns(format_name: str) -> int:
    return 512 if format_name.endswith("_k") else 544 if format_name in BLOCK_TYPES else 533


def random_rows(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, cols)) * rng.uniform(0.1, 10, (rows, 1))).astype(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().view(torch.uint16).numpy()


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).double().numpy()


def multiply(
    weights: Weights,
    x: Any,
    store: str = "set",
    y: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    rows: tuple[int, int] | None = None,
    panels: tuple[int, int] | None = None,
    tiles: bool = True,
) -> np.ndarray:
    """y [rows, matrix rows (half of them if gated)]. x: Prepared, or bfloat16 bits or float32 [rows, stride]."""
    values = x.values if isinstance(x, Prepared) else x
    count, stride = values.shape
    if y is None:
        y = np.full((count, weights.rows // 2 if weights.gated else weights.rows), np.nan, np.float32)
    kind = {np.int8: "int8", np.int16: "int16", np.uint16: "bfloat16", np.float32: "float32"}[values.dtype.type]
    weights.library.multiply(
        int(tiles), weights.handle, TYPES[kind], count, stride, pointer(values),
        pointer(x.scales if isinstance(x, Prepared) else None), pointer(x.sums if isinstance(x, Prepared) else None),
        STORES[store], TYPES["bfloat16" if y.dtype == np.uint16 else "float32"], pointer(y),
        ctypes.c_size_t(y.strides[0] // y.itemsize), pointer(bias), *(rows or (0, count)),
        *(panels or (0, weights.panels)),
    )  # fmt: skip
    return y


def exact_product(x: np.ndarray, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """Of bfloat16 bits, in float64, and the sum of what is added, by size: what an error is to be compared with."""
    rows, matrix = bf16_values(x), bf16_values(weights.dequantized()[1]).T
    return rows @ matrix, np.abs(rows) @ np.abs(matrix)


# -- tiles --------------------------------------------------------------------------------------------------------


def dot_bf16(probe: Probe, sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One TDPBF16PS: sums [rows, 16] + a [rows, 2 groups] x b [2 groups, 16]."""
    rows, depth = a.shape
    result = np.ascontiguousarray(sums, np.float32)
    lines = np.ascontiguousarray(bf16_bits(b).reshape(depth // 2, 2, 16).transpose(0, 2, 1))
    bits = bf16_bits(a)
    probe.library.dot_tiles(1, rows, depth // 2, pointer(result), pointer(bits), pointer(lines))
    return result


@pytest.mark.parametrize(("rows", "groups"), [(16, 16), (1, 16), (5, 3)])
def test_tiles_of_whole_numbers(probe: Probe, rows: int, groups: int) -> None:
    rng = np.random.default_rng(rows)
    sums, a, b = (rng.integers(-99, 99, size) for size in ((rows, 16), (rows, 2 * groups), (2 * groups, 16)))
    assert np.array_equal(dot_bf16(probe, sums, a, b), sums + a @ b)

    sums = sums.astype(np.int32)
    a, b = (rng.integers(low, low + 256, size) for low, size in ((-128, (rows, 4 * groups)), (0, (4 * groups, 16))))
    expected = sums + a @ b
    lines = np.ascontiguousarray(b.astype(np.uint8).reshape(groups, 4, 16).transpose(0, 2, 1))
    activations = a.astype(np.int8)
    probe.library.dot_tiles(0, rows, groups, pointer(sums), pointer(activations), pointer(lines))
    assert np.array_equal(sums, expected)


def test_a_tile_adds_first_numbers_and_second_numbers_apart(probe: Probe) -> None:
    """A sum of 2^24 swallows every 1 that is added to it alone, but not two that were added to each other before."""
    big, ones = float(2**24), np.ones((32, 16), np.float32)
    a = np.ones((1, 32), np.float32)
    a[0, 0] = big
    assert (dot_bf16(probe, np.zeros((1, 16)), a, ones) == big + 16).all()
    a[0, 30] = -big  # the last of the first numbers: what was swallowed is gone
    assert (dot_bf16(probe, np.zeros((1, 16)), a, ones) == 16).all()
    a[0, 2:] = 0
    a[0, :2] = 1
    assert (dot_bf16(probe, np.full((1, 16), big), a, ones) == big + 2).all()


def test_a_tile_takes_denormals_as_zero(probe: Probe) -> None:
    smallest = float(np.finfo(np.float32).tiny)
    factors = np.zeros((1, 32), np.float32)
    factors[0, 0] = 1
    for sums, a, b, expected in [
        (0, smallest / 2, 1, 0),  # a factor
        (0, smallest, 0.5, 0),  # a product
        (smallest, smallest, 1, 2 * smallest),
        (smallest / 2, smallest, 1, smallest),  # a sum so far
        (-1.5 * smallest, smallest, 1, 0),  # a new sum
    ]:
        row, matrix = factors * np.float32(a), np.full((32, 16), b, np.float32)
        assert (dot_bf16(probe, np.full((1, 16), sums, np.float32), row, matrix) == np.float32(expected)).all()


# -- products of bfloat16 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 50])
def test_product(probe: Probe, format_name: str, rows: int) -> None:
    weights = Weights(probe, format_name, 16 * 6 + 5, columns(format_name), gated=False)
    x = probe.prepare(random_rows(rows, weights.cols), "bfloat16")
    exact, size = exact_product(x, weights)
    assert (np.abs(multiply(weights, x) - exact) <= ROOM * size).all()


def test_products_of_random_shapes(probe: Probe) -> None:
    rng = np.random.default_rng(0)
    for seed in range(12):
        rows, matrix_rows, cols = (int(rng.integers(1, most)) for most in (70, 130, 300))
        weights = Weights(probe, "bfloat16", matrix_rows, cols, gated=False, seed=seed)
        x = probe.prepare(random_rows(rows, cols, seed), "bfloat16")
        exact, size = exact_product(x, weights)
        assert (np.abs(multiply(weights, x) - exact) <= ROOM * size).all(), (rows, matrix_rows, cols)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [7, 37])
def test_gated_product(probe: Probe, format_name: str, kind: str, rows: int) -> None:
    weights = Weights(probe, format_name, 2 * (16 * 3 + 3), columns(format_name), gated=True)
    x = probe.prepare(random_rows(rows, weights.cols) / 10, "bfloat16")
    bias = random_rows(1, weights.rows, seed=5)[0]
    exact, size = exact_product(x, weights)
    gate, up = np.split(exact + bias, 2, axis=1)
    expected = gate / (1 + np.exp(np.minimum(-gate, 700))) * up
    y = np.zeros(expected.shape, np.uint16 if kind == "bfloat16" else np.float32)
    multiply(weights, x, "gated", y, bias)
    room = 2 * ROOM * np.maximum(*np.split(size, 2, axis=1)) * (1 + np.abs(up) + np.abs(gate))
    if kind == "bfloat16":
        room = room + np.abs(expected) / 256
    assert (np.abs((bf16_values(y) if kind == "bfloat16" else y) - expected) <= room).all()


@pytest.mark.parametrize("store", ["set", "add"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [5, 19, 45])
def test_bias_and_residual(probe: Probe, store: str, kind: str, rows: int) -> None:
    """Rows that two tiles share are added once, and nothing is written past the columns of the matrix."""
    weights = Weights(probe, "int8", 45, 64, gated=False)
    x = probe.prepare(random_rows(rows, 64), kind)
    bias, y = random_rows(1, 45, seed=5)[0], random_rows(rows, 50, seed=6)
    before = y.copy()
    multiply(weights, x, store, y[:, :45], bias)
    expected = multiply(weights, x) + bias + (before[:, :45] if store == "add" else 0)
    assert np.array_equal(y[:, :45], expected)
    assert np.array_equal(y[:, 45:], before[:, 45:])


# -- products of int8 weights and activations of two bytes ----------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 37])
def test_products_of_two_bytes(probe: Probe, gated: bool, rows: int) -> None:
    """Of whole rows, against float64: what the bytes stand for, and how near that is to the numbers they came from."""
    weights = Weights(probe, "int8", 90, 182, gated)  # 192 columns with their padding
    x = random_rows(rows, 182)
    ready = probe.prepare(x, "int16")
    exact = ready.floats()
    assert np.abs(exact[:, :182] - x).max() <= np.abs(x).max() / 64000
    expected = exact @ weights.dequantized()[0].astype(np.float64).T
    if gated:
        gate, up = np.split(expected, 2, axis=1)
        expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
    got = multiply(weights, ready, "gated" if gated else "set")
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("store", ["set", "add"])
def test_rows_of_two_bytes_do_not_depend_on_their_neighbours(probe: Probe, store: str) -> None:
    rng = np.random.default_rng(7)
    weights = Weights(probe, "int8", 112, 192, gated=False)
    ready = probe.prepare(random_rows(41, 192), "int16")
    y, bias = random_rows(41, 112, 2), rng.standard_normal(112).astype(np.float32)
    whole = multiply(weights, ready, store, y.copy(), bias)
    for first, end in ((0, 1), (1, 17), (17, 41), (40, 41)):
        part = multiply(weights, ready, store, y.copy(), bias, rows=(first, end))
        np.testing.assert_array_equal(part[first:end], whole[first:end])
        np.testing.assert_array_equal(part[:first], y[:first])
        np.testing.assert_array_equal(part[end:], y[end:])
    odd = multiply(weights, ready, store, y.copy(), bias, panels=(2, 5))
    np.testing.assert_array_equal(odd[:, 32:80], whole[:, 32:80])


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 17, 181])
def test_two_bytes_of_a_number_that_is_not_finite(probe: Probe, column: int, value: float, normed: bool) -> None:
    """It spoils its row, and no other."""
    weights = Weights(probe, "int8", 40, 182, gated=False)
    norm = np.ones(182, np.float32) if normed else None
    x = random_rows(5, 182)
    clean = multiply(weights, probe.prepare(x, "int16", norm))
    x[2, column] = value
    spoilt = multiply(weights, probe.prepare(x, "int16", norm))
    assert not np.isfinite(spoilt[2]).any()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(spoilt[others], clean[others])


def test_the_largest_numbers_of_two_bytes(probe: Probe) -> None:
    """Rows of zeros, and sums as large as they get."""
    weights = Weights(probe, "int8", 16, 1536, gated=False)
    x = np.stack([np.zeros(1536), np.sign(weights.dequantized()[0][0]) * 1e4]).astype(np.float32)
    got = multiply(weights, probe.prepare(x, "int16"))
    assert (got[0] == 0).all()
    expected = x[1].astype(np.float64) @ weights.dequantized()[0].astype(np.float64).T
    np.testing.assert_allclose(got[1], expected, rtol=1e-5, atol=1)


# -- products of int8 and float32 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", QUANTISED)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [3, 16, 23, 48])
def test_int8_products_have_the_bits_of_avx512(probe: Probe, format_name: str, gated: bool, rows: int) -> None:
    cols = 768 if format_name.endswith("_k") else 64 if rows == 16 else 224
    weights = Weights(probe, format_name, 2 * (16 * 2 + 3), cols, gated)
    x = probe.prepare(random_rows(rows, cols), "int8")
    store = "gated" if gated else "set"
    assert np.array_equal(multiply(weights, x, store), multiply(weights, x, store, tiles=False))


@pytest.mark.parametrize("format_name", QUANTISED)
def test_extreme_int8_numbers(probe: Probe, format_name: str) -> None:
    weights = Weights(probe, format_name, 64, 512, gated=False, seed=9)
    x = probe.prepare(np.where(weights.floats[:20] > 0, 1, -1).astype(np.float32), "int8")
    assert np.array_equal(multiply(weights, x), multiply(weights, x, tiles=False))


def test_float32_activations_take_the_way_of_avx512(probe: Probe) -> None:
    weights = Weights(probe, "float32", 37, 64, gated=False)
    x = probe.prepare(random_rows(20, 64), "float32")
    assert np.array_equal(multiply(weights, x), multiply(weights, x, tiles=False))


# -- one order of additions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_name", "kind"), [*((name, "bfloat16") for name in FORMATS), *((name, "int8") for name in QUANTISED)]
)
def test_a_row_has_the_same_bits_in_any_batch_and_any_task(probe: Probe, format_name: str, kind: str) -> None:
    weights = Weights(probe, format_name, 16 * 7 + 1, 256 if format_name.endswith("_k") else 96, gated=False)
    x = random_rows(40, weights.cols)
    whole = multiply(weights, probe.prepare(x, kind))
    for count in range(1, 41):
        first = (7 * count) % (41 - count)
        part = multiply(weights, probe.prepare(x[first : first + count], kind))
        assert np.array_equal(part, whole[first : first + count]), count
    pieces, prepared = np.full_like(whole, np.nan), probe.prepare(x, kind)
    for rows in [(0, 8), (8, 9), (9, 40)]:
        for panels in [(0, 1), (1, 4), (4, 8)]:
            multiply(weights, prepared, "set", pieces, rows=rows, panels=panels)
    assert np.array_equal(pieces, whole)


# -- whether it is used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "expected"), [("right", 1), ("wrong", 0), ("illegal", 0), ("endless", 0)])
def test_tiles_are_tried_out_in_a_child_process(probe: Probe, kind: str, expected: int) -> None:
    assert probe.library.check(kind.encode()) == expected


REAL_TILES = """
#include "gemm_amx.h"
using namespace kllm;
template void amx::bf16_groups<amx::Leave::kAdd, 4>(const GemmTask&, int&);
template void amx::i16_groups<amx::Leave::kGated, 2>(const GemmTask&, int&);
template void amx::int8_panels<Format::kQ4_1, 2>(const GemmTask&, const amx::RowTiles&, int);
"""


def test_the_real_tile_instructions_compile(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, *FLAGS["avx512_bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-x", "c++"]
    if subprocess.run([*command, "-fsyntax-only", "/dev/null"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler does not know AMX")
    command += ["-std=c++20", "-O2", "-Wall", "-Wno-maybe-uninitialized", "-DKLLM_ISA=amx", f"-I{NATIVE}", "-c", "-"]
    command += ["-o", str(tmp_path / "tiles.o")]
    built = subprocess.run(command, input=REAL_TILES, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert not built.stderr


def test_a_processor_without_amx_is_not_asked_for_it() -> None:
    need_instruction_set("avx2")
    if "amx_tile" in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor has AMX")
    from kllm.kernels.cpu import _native

    assert "amx" not in _native.instruction_sets()
    with pytest.raises(ValueError, match="instruction set amx is unknown or not supported by this processor"):
        _native.use_instruction_set("amx")
