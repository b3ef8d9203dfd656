"""All layers of a dense model as one native call per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kllm.kernels.batch import ForwardBatch
from kllm.kernels.cpu import _native
from kllm.kernels.cpu.embedding import look_up
from kllm.kernels.cpu.spans import span_array
from kllm.kernels.operators import DenseLayer, DenseShape, EmbeddingTable


class NativeDenseStack:
    """See DenseStack. The residual stream is float32. `native.timing` and `native.take_seconds()` say where the time
    of a step goes."""

    def __init__(
        self,
        shape: DenseShape,
        layers: Sequence[DenseLayer],
        embedding: EmbeddingTable,
        product: str,
        int8_products: bool,
    ) -> None:
        self._embedding = embedding
        self._hidden = shape.hidden
        self._layers = len(layers)
        self.native = _native.Decoder(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.eps,
            product,
            int8_products,
            shape.cos.contiguous(),
            shape.sin.contiguous(),
            _floats(shape.final_norm),
        )
        for layer in layers:
            self.native.add_layer(
                _floats(layer.attention_norm),
                layer.qkv.data,
                _floats(layer.qkv_bias),
                _floats(layer.q_norm),
                _floats(layer.k_norm),
                layer.out.data,
                _floats(layer.out_bias),
                _floats(layer.mlp_norm),
                layer.gate_up.data,
                _floats(layer.gate_up_bias),
                layer.down.data,
                _floats(layer.down_bias),
            )
        self._cache: Mapping[str, Sequence[torch.Tensor]] | None = None
        self._addresses = torch.empty(0, dtype=torch.int64)

    def __call__(
        self, tokens: torch.Tensor, batch: ForwardBatch, cache: Mapping[str, Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        if cache is not self._cache:
            self._cache, self._addresses = cache, _cache_addresses(cache, self._layers)
        x = look_up(self._embedding, tokens)
        count = tokens.shape[0]
        wanted = batch.wanted if batch.wanted is not None else torch.arange(count)
        spans, tables = span_array(batch), batch.tables.contiguous()
        out = torch.empty(wanted.shape[0], self._hidden)
        self.native.forward(
            x.data_ptr(),
            count,
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            spans.data_ptr(),
            spans.shape[0],
            wanted.data_ptr(),
            wanted.shape[0],
            batch.block_tokens,
            str(cache["k"][0].dtype).removeprefix("torch."),
            self._addresses.data_ptr(),
            out.data_ptr(),
        )
        return out


def _floats(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.float().contiguous()


def _cache_addresses(cache: Mapping[str, Sequence[torch.Tensor]], layers: int) -> torch.Tensor:
    """k, v, k_scale, v_scale of every layer: int64 [layers, 4], 0 for what is not there."""
    names = ("k", "v", "k_scale", "v_scale")
    rows = [[cache[name][layer].data_ptr() if name in cache else 0 for name in names] for layer in range(layers)]
    return torch.tensor(rows, dtype=torch.int64)
