"""The frame every architecture here shares: embedding, pre-norm layers with residuals, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kllm.cache.kv_spec import Group, KVSpec
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import DenseLayer, DenseShape, EmbeddingTable, Operators, Rotation
from kllm.models.interface import KVCache
from kllm.models.layers.gqa import GqaAttention
from kllm.models.layers.mlp import Mlp
from kllm.models.layers.rotary import RotaryTable, read_length
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig


class Attention(Protocol):
    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, rotation: Rotation, cache: KVCache, layer: int
    ) -> torch.Tensor: ...


FeedForward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: FeedForward

    def as_dense(self) -> DenseLayer | None:
        """The same as DenseLayer, if it is one."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, GqaAttention) or not isinstance(mlp, Mlp):
            return None
        return DenseLayer(
            self.attention_norm,
            attention.qkv,
            attention.qkv_bias,
            attention.q_norm,
            attention.k_norm,
            attention.out,
            attention.out_bias,
            self.mlp_norm,
            mlp.gate_up,
            mlp.gate_up_bias,
            mlp.down,
            mlp.down_bias,
        )


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What every architecture's config says alike."""

    vocab_size: int
    hidden: int
    layers: int
    max_positions: int
    eps: float
    tied: bool


def read_dimensions(config: ModelConfig, eps: float = 1e-6) -> Dimensions:
    """eps: the architecture's default. Raises WeightError for what no architecture here supports."""
    config.require("hidden_act", ("silu", "swish"), "silu")
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is not supported: the weights are quantised")
    return Dimensions(
        vocab_size=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=config.integer("num_hidden_layers"),
        max_positions=read_length(config),
        eps=config.number("rms_norm_eps", eps),
        tied=config.boolean("tie_word_embeddings", False),
    )


class Decoder:
    """A causal language model (the Model contract of kllm.models.interface)."""

    def __init__(
        self,
        dimensions: Dimensions,
        operators: Operators,
        embedding: EmbeddingTable,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: LinearWeight,
        rotary: RotaryTable,
        kv_group: Group,
    ) -> None:
        self.vocab_size = dimensions.vocab_size
        self.max_model_len = dimensions.max_positions
        self.dtype = embedding.dtype
        self._eps = dimensions.eps
        self._operators = operators
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._kv_group = kv_group
        dense = self._as_dense(dimensions.hidden, rotary)
        self._stack = operators.dense_stack(*dense) if dense is not None else None
        self._rotary = rotary if self._stack is None else None  # a stack has the table, which can be large, as its own

    def kv_spec(self, block_tokens: int) -> KVSpec:
        return KVSpec((self._kv_group,), block_tokens)

    def forward(self, tokens: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        ops, eps = self._operators, self._eps
        if self._stack is not None:
            return self._stack(tokens, batch, cache)
        assert self._rotary is not None
        rotation = self._rotary.at(batch.positions)
        x = ops.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            x = x + layer.attention(ops.rms_norm(x, layer.attention_norm, eps), batch, rotation, cache, index)
            x = x + layer.mlp(ops.rms_norm(x, layer.mlp_norm, eps))
        if batch.wanted is not None:
            x = x.index_select(0, batch.wanted)
        return ops.rms_norm(x, self._final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._operators.linear(hidden, self._head).float()

    def _as_dense(self, hidden: int, rotary: RotaryTable) -> tuple[DenseShape, list[DenseLayer], EmbeddingTable] | None:
        """The layers as operators take them in one piece, if they are all of that kind."""
        layers = [layer.as_dense() for layer in self._layers]
        dense = [layer for layer in layers if layer is not None]
        first = self._layers[0].attention if self._layers else None
        if len(dense) < len(layers) or not isinstance(first, GqaAttention) or rotary.interleaved:
            return None
        shape = first.shape
        cos, sin = rotary.cos, rotary.sin
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
        dims = DenseShape(hidden, heads, kv_heads, size, self._eps, cos, sin, self._final_norm, self.dtype)
        return dims, dense, self._embedding


LayerReader = Callable[[str, int], tuple[Attention, FeedForward]]
"""(prefix such as `model.layers.3.`, layer index) to the layer's two halves."""


def read_decoder(
    reader: TensorReader, dimensions: Dimensions, read_layer: LayerReader, rotary: RotaryTable, kv_group: Group
) -> Decoder:
    """Reads embedding, head, norms and, through read_layer, everything else. Reports progress per layer."""
    hidden, steps = dimensions.hidden, dimensions.layers + 2
    rows = reader.rows("model.embed_tokens", dimensions.vocab_size, hidden)
    head = reader.operators.pack_linear(rows) if dimensions.tied else None
    embedding = reader.operators.pack_embedding(rows, reader.dtype, head)
    del rows
    reader.report(1 / steps)
    layers = []
    for index in range(dimensions.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = read_layer(prefix, index)
        norms = [
            reader.tensor(f"{prefix}{name}.weight", hidden) for name in ("input_layernorm", "post_attention_layernorm")
        ]
        layers.append(DecoderLayer(norms[0], attention, norms[1], mlp))
        reader.report((index + 2) / steps)
    final_norm = reader.tensor("model.norm.weight", hidden)
    if head is None:
        head = reader.linear(["lm_head"], [dimensions.vocab_size], hidden)
    reader.report(1.0)
    return Decoder(dimensions, reader.operators, embedding, layers, final_norm, head, rotary, kv_group)


def dtype_name(dtype: torch.dtype) -> str:
    """As KV specs spell it: torch.bfloat16 to "bfloat16"."""
    return str(dtype).removeprefix("torch.")
