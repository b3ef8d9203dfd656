"""DeepSeek's multi-head latent attention: one latent and one rotary key per token, shared by all heads.

cache entry   [ latent R (normed) | rotary key dr (rotated) ]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kllm.cache.kv_spec import Group, Record
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import LatentWeights, MlaForm, Operators, Rotation
from kllm.models.interface import KVCache
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig

LATENT_NORM_EPS = 1e-6  # of the two inner norms, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes: q_rank of the query's latent (None: queries come from x directly), rank of the latent that is kept,
    nope / rope / value per head."""

    hidden: int
    heads: int
    q_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int

    def kv_group(self, layers: int, dtype: str) -> Group:
        return Group("full", (Record("latent", layers, (self.rank + self.rope,), dtype, shard="none"),))


def read_mla_shape(config: ModelConfig) -> MlaShape:
    return MlaShape(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        rank=config.integer("kv_lora_rank"),
        nope=config.integer("qk_nope_head_dim"),
        rope=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """The second half of the query projection where there is a latent."""

    norm: torch.Tensor
    up: LinearWeight


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """down: query part (latent or all heads), latent and rotary key as one matrix."""

    operators: Operators
    shape: MlaShape
    scale: float
    form: MlaForm
    down: LinearWeight
    down_bias: torch.Tensor | None
    query: QueryLatent | None
    latent_norm: torch.Tensor
    weights: LatentWeights
    out: LinearWeight
    out_bias: torch.Tensor | None

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, rotation: Rotation, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]; writes the tokens' latents of this layer first."""
        ops, shape = self.operators, self.shape
        down = ops.linear(x, self.down, self.down_bias)
        q, latent, key_rope = down.split((down.shape[1] - shape.rank - shape.rope, shape.rank, shape.rope), dim=1)
        if self.query is not None:
            q = ops.linear(ops.rms_norm(q, self.query.norm, LATENT_NORM_EPS), self.query.up)
        q = q.unflatten(1, (shape.heads, -1))
        q_nope, q_rope = q[..., : shape.nope], q[..., shape.nope :]
        rotated = ops.rope(torch.cat((q_rope, key_rope.unsqueeze(1)), dim=1), rotation)
        normed = ops.rms_norm(latent, self.latent_norm, LATENT_NORM_EPS)
        entries = torch.cat((normed, rotated[:, shape.heads]), dim=1)
        ops.write_kv(cache["latent"][layer], entries, batch)
        attended = ops.mla_attention(
            q_nope, rotated[:, : shape.heads], cache["latent"][layer], self.weights, batch, self.scale, self.form
        )
        return ops.linear(attended.flatten(1), self.out, self.out_bias)


def read_mla(
    reader: TensorReader, prefix: str, shape: MlaShape, *, bias: bool, scale: float, form: MlaForm
) -> MlaAttention:
    """From `{prefix}q_a_proj`, `q_a_layernorm`, `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`, `kv_a_layernorm`,
    `kv_b_proj` and `o_proj`. bias: of the two a-projections and o_proj."""
    q_size = shape.heads * (shape.nope + shape.rope)
    kv_name = f"{prefix}kv_a_proj_with_mqa"
    names = [f"{prefix}q_a_proj" if shape.q_rank else f"{prefix}q_proj", kv_name]
    outs = [shape.q_rank or q_size, shape.rank + shape.rope]
    query = None
    if shape.q_rank is not None:
        norm = reader.tensor(f"{prefix}q_a_layernorm.weight", shape.q_rank)
        query = QueryLatent(norm, reader.linear([f"{prefix}q_b_proj"], [q_size], shape.q_rank))
    per_head = shape.nope + shape.value
    kv_b = reader.tensor(f"{prefix}kv_b_proj.weight", shape.heads * per_head, shape.rank)
    key, value = kv_b.unflatten(0, (shape.heads, per_head)).split((shape.nope, shape.value), dim=1)
    return MlaAttention(
        reader.operators,
        shape,
        scale,
        form,
        reader.linear(names, outs, shape.hidden),
        _down_bias(reader, names, outs, shape) if bias else None,
        query,
        reader.tensor(f"{prefix}kv_a_layernorm.weight", shape.rank),
        LatentWeights(key.contiguous(), value.contiguous()),
        reader.linear([f"{prefix}o_proj"], [shape.hidden], shape.heads * shape.value),
        reader.bias([f"{prefix}o_proj"], [shape.hidden]) if bias else None,
    )


def _down_bias(reader: TensorReader, names: list[str], outs: list[int], shape: MlaShape) -> torch.Tensor:
    """A query projection without a latent has no bias, even where the others have one."""
    if shape.q_rank is not None:
        return reader.bias(names, outs)
    zeros = torch.zeros(outs[0], dtype=reader.dtype)
    return torch.cat((zeros, reader.bias(names[1:], outs[1:])))
