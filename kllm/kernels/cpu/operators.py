"""Operators over the native extension; what it does not have falls back to plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kllm.kernels.batch import ForwardBatch
from kllm.kernels.cpu import _native
from kllm.kernels.cpu.dense_stack import NativeDenseStack
from kllm.kernels.cpu.embedding import look_up
from kllm.kernels.cpu.spans import span_array
from kllm.kernels.linear import LinearWeight, QuantizedRows, WeightSource
from kllm.kernels.operators import DenseLayer, DenseShape, DenseStack, EmbeddingTable
from kllm.kernels.reference import ReferenceOperators

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
"""Types the extension computes with. float16 goes through torch."""

REVISION = 3
"""Goes up with every change of what the native operators give, so that no KV of another arithmetic is shared."""


class CpuOperators(ReferenceOperators):
    """A row's result is the same, bit for bit, whatever else is in the batch, as long as the instruction set is.

    int8_products: quantised weights are multiplied with int8 activations (groups of 32, one scale each), and an int8
    cache with q and probabilities of one byte; else weights with activations in the type of the model, and the cache
    with q and probabilities of two bytes."""

    name: ClassVar[str] = "cpu"
    quantized_formats: ClassVar[frozenset[str]] = frozenset({"int8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"})

    def __init__(self, int8_products: bool = True) -> None:
        self._int8_products = int8_products
        self._arena = _native.Arena()

    def describe(self) -> str:
        return f"{self.name} ({_native.instruction_set()}, {_native.threads()} threads)"

    def numerics(self) -> str:
        return f"{self.name} {_native.instruction_set()} {REVISION}"

    def pack_linear(self, *parts: WeightSource, gated: bool = False) -> LinearWeight:
        if any(isinstance(part, torch.Tensor) and part.dtype not in NAMES for part in parts):
            return super().pack_linear(*parts, gated=gated)
        kind = {part.format if isinstance(part, QuantizedRows) else NAMES[part.dtype] for part in parts}
        if len(kind) != 1:
            raise TypeError(f"parts of one matrix in different formats: {', '.join(sorted(kind))}")
        rows = [part.rows if isinstance(part, QuantizedRows) else part.shape[0] for part in parts]
        cols = parts[0].cols if isinstance(parts[0], QuantizedRows) else parts[0].shape[1]
        matrix = _native.Matrix(self._arena, kind.pop(), sum(rows), cols, gated and len(set(rows)) == 1)
        first = 0
        for part, count in zip(parts, rows, strict=True):
            _fill(matrix, first, part)
            first += count
        return LinearWeight(matrix, sum(rows), cols, packed=True)

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        matrix = weight.data
        if not isinstance(matrix, _native.Matrix):
            return super().linear(x, weight, bias)
        floats = x.float().contiguous()
        y = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype)
        offset = None if bias is None else bias.float()
        product = self._product(matrix, x.dtype)
        _native.linear(matrix, floats.data_ptr(), x.shape[0], product, y.data_ptr(), _name(x.dtype), _address(offset))
        return y

    def pack_embedding(self, rows: WeightSource, dtype: torch.dtype, head: LinearWeight | None) -> EmbeddingTable:
        """The head's own memory serves both, where the two are tied."""
        if head is None and isinstance(rows, torch.Tensor):
            return super().pack_embedding(rows, dtype, head)
        return EmbeddingTable((head or self.pack_linear(rows)).data, dtype)

    def embedding(self, tokens: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        if isinstance(table.data, torch.Tensor):
            return super().embedding(tokens, table)
        return look_up(table, tokens).to(table.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight.to(x.dtype), eps)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if k_cache.dtype not in NAMES:
            return super().attention(q, k_cache, v_cache, batch, scale, k_scales, v_scales)
        tokens, heads, size = q.shape
        queries = q.float().contiguous()
        out = torch.empty(tokens, heads, size)
        spans = span_array(batch)
        tables = batch.tables.contiguous()
        _native.attention(
            queries.data_ptr(),
            out.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            _address(k_scales),
            _address(v_scales),
            NAMES[k_cache.dtype],
            tables.data_ptr(),
            tables.shape[1],
            spans.data_ptr(),
            spans.shape[0],
            batch.block_tokens,
            heads,
            k_cache.shape[2],
            size,
            scale,
            not self._int8_products,
        )
        return out.to(q.dtype)

    def dense_stack(
        self, shape: DenseShape, layers: Sequence[DenseLayer], embedding: EmbeddingTable
    ) -> DenseStack | None:
        matrices = [weight for layer in layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if not all(isinstance(weight.data, _native.Matrix) for weight in matrices):
            return None
        if not all(layer.gate_up.data.gated for layer in layers):
            return None
        return NativeDenseStack(shape, layers, embedding, _name(shape.dtype), self._int8_products)

    def _product(self, matrix: _native.Matrix, dtype: torch.dtype) -> str:
        """Type of the activations that this matrix is multiplied with."""
        if matrix.format in ("float32", "bfloat16"):
            return matrix.format
        return "int8" if self._int8_products else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    """Raises ValueError for activations that the extension does not have."""
    if dtype not in NAMES:
        raise ValueError(f"the cpu operators do not multiply quantised weights in {str(dtype).removeprefix('torch.')}")
    return NAMES[dtype]


def _fill(matrix: _native.Matrix, first: int, part: WeightSource) -> None:
    if isinstance(part, torch.Tensor):
        values = part.contiguous()
        fill = matrix.fill_bf16 if values.dtype == torch.bfloat16 else matrix.fill
        fill(first, values.shape[0], values.data_ptr())
    elif part.format == "int8":
        assert part.scales is not None
        values, scales = part.data.contiguous(), part.scales.contiguous()
        matrix.fill_int8(first, part.rows, values.data_ptr(), scales.data_ptr())
    else:
        matrix.fill_blocks(first, part.rows, part.data.contiguous().data_ptr())


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
