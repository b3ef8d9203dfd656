"""The quantised products of native/, called from Python: random weights in every format, activations, products."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kllm.hub.gguf import TENSOR_TYPES, TensorType
from kllm.quantization.block_decoders import decode

TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int16": 3}
STORES = {"set": 0, "add": 1, "gated": 2}
BLOCK_TYPES: dict[str, TensorType] = {
    kind.name.lower(): kind for kind in TENSOR_TYPES.values() if kind.name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
}
_HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q6_k": (208,)}  # where a block has fp16 numbers


def pointer(array: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def random_blocks(format_name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, but with scales of a usual size."""
    kind = BLOCK_TYPES[format_name]
    blocks = rng.integers(0, 256, (rows, cols // kind.block, kind.size), dtype=np.uint8)
    for at in _HALVES[format_name]:
        scales = rng.uniform(-0.02, 0.02, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


@dataclass(frozen=True)
class Prepared:
    """Activations of `rows` rows. int8: values [rows, stride], scales and sums [rows, stride / 32]. int16, high bytes
    of a row before its low ones: values [rows, stride], scales [rows], sums [rows, 2]."""

    values: np.ndarray
    scales: np.ndarray
    sums: np.ndarray

    def floats(self) -> np.ndarray:
        if self.values.dtype == np.int16:
            high, low = np.split(self.values.view(np.int8).astype(np.float64), 2, axis=1)
            return (high + low / 254) * self.scales[:, None].astype(np.float64)
        return self.values.astype(np.float64) * np.repeat(self.scales.astype(np.float64), 32, axis=1)


class Probe:
    """One compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.weights_new.restype = ctypes.c_void_p
        library.gemm.restype = ctypes.c_double
        library.weights_bytes.restype = ctypes.c_size_t

    def prepare(self, x: np.ndarray, kind: str, norm: np.ndarray | None = None, eps: float = 1e-5) -> Any:
        """x float32 [rows, cols]: Prepared, or float32 / bfloat16 bits [rows, stride]."""
        rows, cols = x.shape
        stride = -(-cols // 32) * 32
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8, "int16": np.int16}[kind]
        values = np.full((rows, stride), 99, dtype)
        groups = 2 if kind == "int16" else stride // 32
        scales, sums = np.full((rows, stride // 32), np.nan, np.float32), np.full((rows, groups), 99, np.int32)
        if kind == "int16":
            scales = np.full(rows, np.nan, np.float32)
        self.library.prepare(
            pointer(x), ctypes.c_size_t(x.strides[0] // 4), pointer(norm), ctypes.c_float(eps), TYPES[kind],
            rows, cols, stride, pointer(values), pointer(scales), pointer(sums),
        )  # fmt: skip
        return Prepared(values, scales, sums) if kind in ("int8", "int16") else values


class Weights:
    """A matrix in a packed format, and the same as float32."""

    def __init__(self, probe: Probe, format_name: str, rows: int, cols: int, gated: bool, seed: int = 0) -> None:
        self.library, self.rows, self.cols, self.gated = probe.library, rows, cols, gated
        handle = self.library.weights_new(format_name.encode(), rows, cols, int(gated))
        assert handle is not None
        self.handle = ctypes.c_void_p(handle)
        rng = np.random.default_rng(seed)
        if format_name in BLOCK_TYPES:
            blocks = random_blocks(format_name, rows, cols, rng)
            self.library.weights_fill_blocks(self.handle, 0, rows, pointer(blocks))
            kind = BLOCK_TYPES[format_name]
            self.floats = decode(torch.from_numpy(blocks), kind, (rows, cols), torch.float32).numpy()
        else:
            values = rng.standard_normal((rows, cols)).astype(np.float32)
            self.library.weights_fill(self.handle, 0, rows, pointer(values))
            self.floats = self.read_rows()
        self.panels = self.library.weights_panels(self.handle)

    def __del__(self) -> None:
        self.library.weights_free(self.handle)

    def read_rows(self) -> np.ndarray:
        out = np.empty((self.rows, self.cols), np.float32)
        for row in range(self.rows):
            self.library.weights_read_row(self.handle, row, pointer(out[row]))
        return out

    def dequantized(self) -> tuple[np.ndarray, np.ndarray]:
        """What the panels hold, in the order of rows: float32 and bfloat16 bits, [rows, padded columns]."""
        padded = -(-self.cols // 32) * 32
        floats, halves = np.empty((self.rows, padded), np.float32), np.empty((self.rows, padded), np.uint16)
        for panel in range(self.panels):
            wide, narrow = np.empty((padded, 16), np.float32), np.empty((padded // 2, 16, 2), np.uint16)
            self.library.weights_dequantize(self.handle, panel, pointer(wide), pointer(narrow))
            first, count = (
                f(self.handle, panel) for f in (self.library.weights_first_row, self.library.weights_row_count)
            )
            floats[first : first + count] = wide.T[:count]
            halves[first : first + count] = narrow.transpose(1, 0, 2).reshape(16, padded)[:count]
        return floats, halves

    def multiply(
        self,
        x: Prepared,
        store: str = "set",
        y: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        rows: tuple[int, int] | None = None,
        panels: tuple[int, int] | None = None,
        repeat: int = 1,
    ) -> tuple[np.ndarray, float]:
        """y [rows, matrix rows (half of them if gated)], and the seconds it took. y: float32 or bfloat16 bits."""
        count, stride = x.values.shape
        if y is None:
            y = np.full((count, self.rows // 2 if self.gated else self.rows), np.nan, np.float32)
        seconds = self.library.gemm(
            self.handle, count, stride, pointer(x.values), pointer(x.scales), pointer(x.sums),
            STORES[store], TYPES["bfloat16" if y.dtype == np.uint16 else "float32"], pointer(y),
            ctypes.c_size_t(y.strides[0] // y.itemsize), pointer(bias), *(rows or (0, count)),
            *(panels or (0, self.panels)), repeat,
        )  # fmt: skip
        return y, seconds
