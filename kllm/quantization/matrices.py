"""Whole matrices to QuantizedRows and back, a cache-sized piece at a time."""

from __future__ import annotations

import torch

from kllm.hub.gguf import TENSOR_TYPES
from kllm.kernels.linear import QuantizedRows
from kllm.quantization.block_decoders import decode
from kllm.quantization.block_encoders import BLOCK, BLOCK_BYTES, encode
from kllm.quantization.int8_rows import to_int8

FORMATS = ("int8", "q8_0", "q4_0", "q4_1")
_PIECE = 1 << 17  # elements at once: half a MiB of float32 stays in the second-level cache


def fits(format: str, cols: int) -> bool:
    """Whether rows of this many columns can have this format: blocks have to be whole."""
    return cols > 0 and (format == "int8" or cols % BLOCK == 0)


def quantize(matrix: torch.Tensor, format: str) -> QuantizedRows:
    """A float matrix [rows, cols] in one of FORMATS. cols must fit the format.

    Raises ValueError for values that are not finite or, as blocks, too large for fp16 scales."""
    rows, cols = matrix.shape
    if format == "int8":
        return _int8(matrix)
    data = torch.empty(rows, cols // BLOCK * BLOCK_BYTES[format], dtype=torch.uint8)
    runs, blocks = matrix.reshape(-1, BLOCK), data.view(-1, BLOCK_BYTES[format])
    step = _PIECE // BLOCK
    for start in range(0, len(runs), step):
        encode(runs[start : start + step], format, blocks[start : start + step])
    return QuantizedRows(format, rows, cols, data)


def dequantize(matrix: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols] in memory of its own; any format of QuantizedRows and any GGUF block type, by its name in lower
    case. Computed in float32, then rounded to dtype."""
    shape = (matrix.rows, matrix.cols)
    if matrix.scales is None:
        return decode(matrix.data.reshape(-1), _BLOCK_TYPES[matrix.format], shape, dtype)
    out = torch.empty(shape, dtype=dtype)
    for start, end in _pieces(matrix.rows, matrix.cols):
        torch.mul(matrix.data[start:end], matrix.scales[start:end, None], out=out[start:end])
    return out


def _int8(matrix: torch.Tensor) -> QuantizedRows:
    rows, cols = matrix.shape
    data, scales = torch.empty(rows, cols, dtype=torch.int8), torch.empty(rows)
    for start, end in _pieces(rows, cols):
        data[start:end], scales[start:end] = to_int8(matrix[start:end])
    if not bool(scales.isfinite().all()):
        raise ValueError("values that are not finite")
    return QuantizedRows("int8", rows, cols, data, scales)


def _pieces(rows: int, cols: int) -> list[tuple[int, int]]:
    """(first, end) of runs of whole rows."""
    step = max(1, _PIECE // cols)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


_BLOCK_TYPES = {kind.name.lower(): kind for kind in TENSOR_TYPES.values() if kind.block > 1}
