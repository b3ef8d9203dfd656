"""Operators whose result for a row is the same, bit for bit, whatever else is in the batch.

A torch kernel chooses its blocking, its vector tail and its split over threads by the shape it is given, so equal
shapes are the whole trick: rows go through in tiles of one fixed shape, filled up with zeros, and element-wise
functions in blocks that leave no tail and are too small to be split. What is left to hold is that an element of a
fixed-shape product does not depend on its place in the tile; the tests check that on the machine they run on.
The promise is for one number of threads: a library may split a product differently for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.nn import functional as F

from kllm.kernels import linear
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.invariant_attention import attend
from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import EmbeddingTable, ExpertWeights, LatentWeights, MlaForm, Operators, Rotation
from kllm.kernels.reference import swap_pairs, tokens_by_expert

ROW_TILE = 16
VECTOR = 64  # elements: a multiple of every vector loop torch is compiled with, for every float type
BLOCK = 16384  # elements per call of an element-wise function; torch splits from 32768 on
NORM_TILE = 256  # most rows per call of a norm


class InvariantOperators(Operators):
    """Slower than reference, by about the padding of small batches to ROW_TILE rows."""

    name: ClassVar[str] = "invariant"

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return by_rows(lambda tile: linear.apply(tile, weight, bias), x, ROW_TILE)

    def embedding(self, tokens: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        rows: torch.Tensor = table.data
        return rows.index_select(0, tokens)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        tile = max(1, min(NORM_TILE, BLOCK // size))
        normed = by_rows(lambda rows: F.rms_norm(rows, (size,), weight, eps), x.reshape(-1, size), tile)
        return normed.view(x.shape)

    def rope(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        # Two products and a sum, each rounded: a fused kernel may round differently in its tail.
        return x * rotation.cos + swap_pairs(x, rotation.interleaved) * rotation.sin

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return by_blocks(F.silu, gate) * up

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
        return attend(q, k_cache, v_cache, batch, scale, v_cache.shape[3], k_scales, v_scales)

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
        """Absorbed for every row: two forms would round differently. Raises ValueError for form "expanded"."""
        if form == "expanded":
            raise ValueError("invariant operators attend to latents in absorbed form only")
        rank = weights.key.shape[2]
        absorbed = by_rows(lambda tile: _per_head(tile, weights.key), q_nope, ROW_TILE)
        query = torch.cat((absorbed, q_rope), dim=-1)
        latents = cache.unsqueeze(2)
        context = attend(query, latents, latents, batch, scale, rank)
        return by_rows(lambda tile: _per_head(tile, weights.value.transpose(1, 2)), context, ROW_TILE)

    def expert_scores(self, x: torch.Tensor, gate: LinearWeight) -> torch.Tensor:
        return by_blocks(torch.sigmoid, self.linear(x.float(), gate))

    def moe(
        self, x: torch.Tensor, experts: ExpertWeights, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        parts = torch.empty(*indices.shape, x.shape[1], dtype=torch.float32)
        for expert, (tokens, slots) in tokens_by_expert(indices):
            gate_up = self.linear(x.index_select(0, tokens), experts.gate_up[expert])
            y = self.linear(self.swiglu(gate_up), experts.down[expert])
            parts[tokens, slots] = y.float() * weights[tokens, slots].unsqueeze(1)
        total = parts[:, 0]
        for slot in range(1, indices.shape[1]):
            total = total + parts[:, slot]
        return total.to(x.dtype)


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tile: int) -> torch.Tensor:
    """function applied to x [T, ...] in tiles of exactly `tile` rows; zeros fill the last one."""
    rows = x.shape[0]
    if rows % tile:
        padded = x.new_zeros(-(-rows // tile) * tile, *x.shape[1:])
        padded[:rows] = x
        x = padded
    parts = [function(part) for part in x.contiguous().split(tile)]
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[:rows]


def by_blocks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An element-wise function of x, in flat blocks of whole vectors."""
    count = x.numel()
    flat = x.reshape(-1)
    if count % VECTOR:
        flat = F.pad(flat, (0, -count % VECTOR))
    parts = [function(part) for part in flat.split(BLOCK)]
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[:count].view(x.shape)


def _per_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [n, H, a] times weights [H, a, b] to [n, H, b]."""
    return torch.bmm(x.transpose(0, 1).contiguous(), weights).transpose(0, 1)
