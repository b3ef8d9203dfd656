"""Operators in plain torch: any machine, any float type, as fast as torch's own kernels allow."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional as F

from kllm.kernels import linear
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import EmbeddingTable, ExpertWeights, LatentWeights, MlaForm, Operators, Rotation
from kllm.kernels.reference_attention import Chunk, DecodeGroup, StepLayout, attend_chunk, attend_rows, attend_rows_sdpa


class ReferenceOperators(Operators):
    """A row's result may differ in its last bits with what else is in the batch: kernels choose by shape."""

    name: ClassVar[str] = "reference"

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear.apply(x, weight, bias)

    def embedding(self, tokens: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        rows: torch.Tensor = table.data
        return rows.index_select(0, tokens)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rope(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return torch.addcmul(x * rotation.cos, swap_pairs(x, rotation.interleaved), rotation.sin)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def write_kv(self, cache: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, batch.slots, values.to(cache.dtype))

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
        layout = StepLayout.of(batch)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in layout.decode:
            k = group.gather(k_cache, "k", q.dtype, k_scales)
            v = group.gather(v_cache, "v", q.dtype, v_scales)
            group.scatter(out, _decode_gqa(group.select(q), k, v, group, scale))
        for chunk in layout.chunks:
            k = chunk.gather(k_cache, "k", q.dtype, k_scales)
            v = chunk.gather(v_cache, "v", q.dtype, v_scales)
            _chunk_gqa(out, q, k, v, chunk, scale)
        return out

    def mla_attention(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        weights: LatentWeights,
        batch: ForwardBatch,
        scale: float,
        form: MlaForm = "auto",
    ) -> torch.Tensor:
        layout = StepLayout.of(batch)
        out = q_nope.new_empty(q_nope.shape[0], weights.value.shape[0], weights.value.shape[1])
        for group in layout.decode:
            if form == "expanded":
                for chunk in group.as_chunks():
                    latent = chunk.gather(cache, "kv", q_nope.dtype)
                    _chunk_expanded(out, q_nope, q_rope, latent, weights, chunk, scale)
                continue
            latent = group.gather(cache, "kv", q_nope.dtype)
            query = absorb_queries(group.select(q_nope), group.select(q_rope), weights)
            context = attend_rows(query, latent, latent[..., : weights.key.shape[2]], group.mask(q_nope.dtype), scale)
            group.scatter(out, context_to_values(context, weights))
        for chunk in layout.chunks:
            latent = chunk.gather(cache, "kv", q_nope.dtype)
            absorbed = form == "absorbed" or (form == "auto" and absorbing_is_cheaper(chunk.count, weights, q_rope))
            attend = _chunk_absorbed if absorbed else _chunk_expanded
            attend(out, q_nope, q_rope, latent, weights, chunk, scale)
        return out

    def expert_scores(self, x: torch.Tensor, gate: LinearWeight) -> torch.Tensor:
        return self.linear(x.float(), gate).sigmoid_()

    def moe(
        self, x: torch.Tensor, experts: ExpertWeights, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, (tokens, slots) in tokens_by_expert(indices):
            gate_up = self.linear(x.index_select(0, tokens), experts.gate_up[expert])
            y = self.linear(self.swiglu(gate_up), experts.down[expert])
            out.index_add_(0, tokens, y.float() * weights[tokens, slots].unsqueeze(1))
        return out.to(x.dtype)


def swap_pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The two elements of each rotary pair exchanged; x [..., D]."""
    if interleaved:
        return x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), dim=-1)


def tokens_by_expert(indices: torch.Tensor) -> list[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """For every expert named in indices [T, k], ascending: the (token, slot) places that name it, in token order."""
    flat = indices.flatten()
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    k = indices.shape[1]
    parts = order.split(counts.tolist())
    return [(int(e), (part // k, part % k)) for e, part in zip(experts.tolist(), parts, strict=True)]


def absorb_queries(q_nope: torch.Tensor, q_rope: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """[n, H, dn] and [n, H, dr] to queries on the latent cache [n, H, R + dr]."""
    latent = torch.bmm(q_nope.transpose(0, 1), weights.key).transpose(0, 1)
    return torch.cat((latent, q_rope), dim=-1)


def context_to_values(context: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """[n, H, R] to [n, H, dv]."""
    return torch.bmm(context.transpose(0, 1), weights.value.transpose(1, 2)).transpose(0, 1)


def absorbing_is_cheaper(count: int, weights: LatentWeights, q_rope: torch.Tensor) -> bool:
    """Per head and cached token, `count` queries cost count·(2R + dr) absorbed; expanded, count·(dn + dr + dv)
    and once R·(dn + dv) to make the key and the value."""
    rank, dn, dv = weights.key.shape[2], weights.key.shape[1], weights.value.shape[1]
    dr = q_rope.shape[2]
    return count * (2 * rank + dr) <= count * (dn + dr + dv) + rank * (dn + dv)


def _decode_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
    """q [B, H, D]; k, v [B, L, Hkv, D]; returns [B, H, D]."""
    rows, heads, size = q.shape
    kv_heads = k.shape[2]
    if q.dtype != torch.bfloat16:
        return attend_rows_sdpa(q, k, v, group.mask(q.dtype), scale)
    # All KV heads as one wide head; each query is zero outside its own head's part. More multiplications, but no
    # copy of the cache into head order, and torch's bfloat16 SDPA is five times slower here (Zen 4, 32 rows, L 576).
    wide = q.new_zeros(rows, kv_heads, heads // kv_heads, kv_heads, size)
    wide.diagonal(dim1=1, dim2=3).copy_(q.view(rows, kv_heads, -1, size).permute(0, 2, 3, 1))
    out = attend_rows(wide.view(rows, heads, -1), k.flatten(2), v.flatten(2), group.mask(q.dtype), scale)
    own = out.view(rows, kv_heads, -1, kv_heads, size).diagonal(dim1=1, dim2=3)
    return own.permute(0, 3, 1, 2).reshape(rows, heads, size)


def _chunk_gqa(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, scale: float
) -> None:
    """k, v [L, Hkv, D]. Writes the chunk's part of out [T, H, D]."""
    kv_heads = k.shape[1]
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    tokens = slice(chunk.start, chunk.start + chunk.count)
    grouped = q[tokens].unflatten(1, (kv_heads, -1))
    attend_chunk(out[tokens].unflatten(1, (kv_heads, -1)), grouped, k, v, chunk.count, scale)


def _chunk_absorbed(
    out: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    weights: LatentWeights,
    chunk: Chunk,
    scale: float,
) -> None:
    """latent [L, R + dr]. Writes the chunk's part of out [T, H, dv]."""
    tokens = slice(chunk.start, chunk.start + chunk.count)
    query = absorb_queries(q_nope[tokens], q_rope[tokens], weights)
    rank = weights.key.shape[2]
    context = query.new_empty(chunk.count, 1, query.shape[1], rank)
    keys = latent.unsqueeze(0)
    attend_chunk(context, query.unsqueeze(1), keys, keys[..., :rank], chunk.count, scale)
    out[tokens] = context_to_values(context.squeeze(1), weights)


def _chunk_expanded(
    out: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    weights: LatentWeights,
    chunk: Chunk,
    scale: float,
) -> None:
    """latent [L, R + dr]. Writes the chunk's part of out [T, H, dv]."""
    heads, dn, rank = weights.key.shape
    length = latent.shape[0]
    compressed, key_rope = latent[:, :rank], latent[:, rank:]
    key_nope = F.linear(compressed, weights.key.flatten(0, 1)).view(length, heads, dn)
    value = F.linear(compressed, weights.value.flatten(0, 1)).view(length, heads, -1)
    key = torch.cat((key_nope, key_rope.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    tokens = slice(chunk.start, chunk.start + chunk.count)
    query = torch.cat((q_nope[tokens], q_rope[tokens]), dim=-1).unsqueeze(2)
    k, v = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
    attend_chunk(out[tokens].unsqueeze(2), query, k, v, chunk.count, scale)
