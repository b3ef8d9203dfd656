"""Grouped-query attention with rotary positions, as llama and its relatives have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kllm.cache.kv_spec import Group, Record
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import Operators, Rotation
from kllm.models.interface import KVCache
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig
from kllm.quantization.int8_rows import to_int8


@dataclass(frozen=True, slots=True)
class GqaShape:
    """heads query heads of head_dim each share kv_heads key/value heads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    def kv_group(self, layers: int, dtype: str) -> Group:
        """int8 comes with a float32 scale per token and head, in records of their own."""
        entry = (self.kv_heads, self.head_dim)
        records = [Record(name, layers, entry, dtype, shard="heads") for name in ("k", "v")]
        if dtype == "int8":
            records += [
                Record(name, layers, (self.kv_heads,), "float32", shard="heads") for name in ("k_scale", "v_scale")
            ]
        return Group("full", tuple(records))


def read_gqa_shape(config: ModelConfig) -> GqaShape:
    """head_dim is hidden / heads where the config does not say. Raises WeightError for numbers that do not divide."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads ({heads}), got {kv_heads}")
    if not config.has("head_dim") and hidden % heads:
        raise config.error("num_attention_heads", f"must divide hidden_size ({hidden}), got {heads}")
    return GqaShape(hidden, heads, kv_heads, config.integer("head_dim", max(1, hidden // heads)))


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """q, k and v are one matrix. q_norm, k_norm: weights [head_dim] of norms over each head (qwen3), or None."""

    operators: Operators
    shape: GqaShape
    qkv: LinearWeight
    out: LinearWeight
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, rotation: Rotation, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]; writes the tokens' k and v of this layer first."""
        ops, shape = self.operators, self.shape
        heads, rotated_heads = shape.heads, shape.heads + shape.kv_heads
        qkv = ops.linear(x, self.qkv, self.qkv_bias).unflatten(1, (-1, shape.head_dim))
        qk, v = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(qk[:, :heads], self.q_norm, self.eps)
            qk = torch.cat((q, ops.rms_norm(qk[:, heads:], self.k_norm, self.eps)), dim=1)
        qk = ops.rope(qk, rotation)
        k, k_scales = self._write(cache, "k", layer, qk[:, heads:], batch)
        v, v_scales = self._write(cache, "v", layer, v, batch)
        attended = ops.attention(qk[:, :heads], k, v, batch, shape.head_dim**-0.5, k_scales, v_scales)
        return ops.linear(attended.flatten(1), self.out, self.out_bias)

    def _write(
        self, cache: KVCache, name: str, layer: int, vectors: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes vectors [T, Hkv, D] into this record, and their scales where it has them. Returns this layer's part
        of the record and of the scales."""
        record = cache[name][layer]
        if f"{name}_scale" not in cache:
            self.operators.write_kv(record, vectors, batch)
            return record, None
        scale_record = cache[f"{name}_scale"][layer]
        values, scales = to_int8(vectors)
        self.operators.write_kv(record, values, batch)
        self.operators.write_kv(scale_record, scales, batch)
        return record, scale_record


def read_gqa(
    reader: TensorReader, prefix: str, shape: GqaShape, *, bias: bool, head_norms: bool, eps: float
) -> GqaAttention:
    """From `{prefix}q_proj`, `k_proj`, `v_proj`, `o_proj` and, with head_norms, `q_norm` and `k_norm`."""
    names = [f"{prefix}{part}_proj" for part in "qkv"]
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outs = [q_size, kv_size, kv_size]
    return GqaAttention(
        reader.operators,
        shape,
        reader.linear(names, outs, shape.hidden),
        reader.linear([f"{prefix}o_proj"], [shape.hidden], q_size),
        reader.bias(names, outs) if bias else None,
        reader.bias([f"{prefix}o_proj"], [shape.hidden]) if bias else None,
        reader.tensor(f"{prefix}q_norm.weight", shape.head_dim) if head_norms else None,
        reader.tensor(f"{prefix}k_norm.weight", shape.head_dim) if head_norms else None,
        eps,
    )
