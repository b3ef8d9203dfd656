"""Kinds of attention: parameters, KV bytes per token, and what a step of them computes and reads.

All figures are of one layer unless said otherwise. A "pair" is a query token and an entry that it attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kllm.costs.errors import UnknownNameError


@dataclass(frozen=True)
class AttentionWork:
    """What all layers together compute and read, as factors of the fields of StepWork; one GPU doing everything.

    flops_attended, flops_selected: operations per attended / selected token. flops_token: per new token.
    expanded_flops_attended, expanded_flops_context: the other way to compute MLA (keys and values of every head are
    expanded from the latents, per context token, and pairs are cheaper); 0, 0 if there is none.
    bytes_context, bytes_selected, bytes_row: read once a step. bytes_token: written per new token.
    indexer_flops, indexer_bytes: of the index that chooses what is selected, per attended and per context token.
    """

    flops_attended: float = 0.0
    flops_selected: float = 0.0
    flops_token: float = 0.0
    expanded_flops_attended: float = 0.0
    expanded_flops_context: float = 0.0
    bytes_context: float = 0.0
    bytes_selected: float = 0.0
    bytes_row: float = 0.0
    bytes_token: float = 0.0
    indexer_flops: float = 0.0
    indexer_bytes: float = 0.0


class Attention(Protocol):
    """One architecture's attention in all `layers` layers. Parameters are counted without norms."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int:
        """KV heads that tensor parallelism can share out; 1: every rank keeps all of the KV."""
        ...

    @property
    def top_k(self) -> int | None:
        """Tokens that a token attends to at most; None: all."""
        ...

    @property
    def sharded_parameters(self) -> int:
        """Per-head matrices, which tensor parallelism shares out."""
        ...

    @property
    def replicated_parameters(self) -> int:
        """Down-projections, indexers and compressors, which every rank keeps."""
        ...

    @property
    def operators(self) -> int:
        """Kernels started per step."""
        ...

    def kv_bytes(self, dtype: str) -> float:
        """Per token, all layers. Raises UnknownNameError."""
        ...

    def row_bytes(self, dtype: str) -> int:
        """Per running request, whatever its length."""
        ...

    def work(self, dtype: str) -> AttentionWork: ...


def _entry_bytes(table: Mapping[str, int], dtype: str) -> int:
    try:
        return table[dtype.lower()]
    except KeyError:
        raise UnknownNameError("KV format of this model", dtype, table) from None


@dataclass(frozen=True)
class GroupedAttention:
    """Multi-head attention whose query heads share KV heads. fp8 and int8 KV carry a scale per token and head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    top_k: None = None
    replicated_parameters: int = 0

    @property
    def sharded_parameters(self) -> int:
        return self.layers * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def operators(self) -> int:
        return self.layers * 5  # norm, qkv, rotation with cache write, attention, output

    def kv_bytes(self, dtype: str) -> float:
        vector = {"bf16": 2 * self.head_dim, "fp8": self.head_dim + 4, "int8": self.head_dim + 4}
        return self.layers * 2 * self.kv_heads * _entry_bytes(vector, dtype)

    def row_bytes(self, dtype: str) -> int:
        return 0

    def work(self, dtype: str) -> AttentionWork:
        kv = self.kv_bytes(dtype)
        pair = 4.0 * self.heads * self.head_dim
        return AttentionWork(flops_attended=self.layers * pair, bytes_context=kv, bytes_token=kv)


@dataclass(frozen=True)
class Indexer:
    """DSA's lightning indexer: scores every earlier token for each query, in `layers` of the layers."""

    layers: int
    heads: int
    top_k: int
    dim: int = 128

    def parameters(self, hidden: int, query_rank: int) -> int:
        return self.layers * (query_rank * self.heads * self.dim + hidden * (self.dim + self.heads))


@dataclass(frozen=True)
class LatentAttention:
    """MLA: one latent of `rank` + `rope` values per token, for all heads; optionally sparse through an indexer.

    nope, rope, value: dimensions of a head's query-key product without and with rotation, and of its value.
    fp8 latents: `rank` bytes, a 4-byte scale per 128 of them, and the rotated part in bf16 (656 bytes).
    """

    layers: int
    hidden: int
    heads: int
    query_rank: int
    nope: int
    value: int
    rank: int = 512
    rope: int = 64
    indexer: Indexer | None = None
    kv_heads: int = 1

    @property
    def top_k(self) -> int | None:
        return self.indexer.top_k if self.indexer else None

    @property
    def sharded_parameters(self) -> int:
        query = self.query_rank * self.heads * (self.nope + self.rope)
        expand = self.rank * self.heads * (self.nope + self.value)
        return self.layers * (query + expand + self.heads * self.value * self.hidden)

    @property
    def replicated_parameters(self) -> int:
        down = self.layers * self.hidden * (self.query_rank + self.rank + self.rope)
        return down + (self.indexer.parameters(self.hidden, self.query_rank) if self.indexer else 0)

    @property
    def operators(self) -> int:
        # norm, down, two norms, q up, rotation with cache write, absorb, attention, expand, output; and the indexer:
        # two projections, norm, rotation with write, scores, top-k.
        return self.layers * 10 + (self.indexer.layers * 6 if self.indexer else 0)

    def with_layer(self) -> LatentAttention:
        """One layer more, which has an indexer of its own if others have."""
        indexer = replace(self.indexer, layers=self.indexer.layers + 1) if self.indexer else None
        return replace(self, layers=self.layers + 1, indexer=indexer)

    def _latent_bytes(self, dtype: str) -> int:
        quantised = self.rank + 4 * (self.rank // 128) + 2 * self.rope
        return _entry_bytes({"bf16": 2 * (self.rank + self.rope), "fp8": quantised}, dtype)

    def _index_bytes(self, dtype: str) -> int:
        """Of one index key: bf16, or fp8 with one 4-byte scale."""
        if self.indexer is None:
            return 0
        return _entry_bytes({"bf16": 2 * self.indexer.dim, "fp8": self.indexer.dim + 4}, dtype)

    def kv_bytes(self, dtype: str) -> float:
        index = self.indexer.layers * self._index_bytes(dtype) if self.indexer else 0
        return self.layers * self._latent_bytes(dtype) + index

    def row_bytes(self, dtype: str) -> int:
        return 0

    def work(self, dtype: str) -> AttentionWork:
        absorbed = self.layers * 2.0 * self.heads * (2 * self.rank + self.rope)
        latents = float(self.layers * self._latent_bytes(dtype))
        kv = self.kv_bytes(dtype)
        if self.indexer is None:
            return AttentionWork(
                flops_attended=absorbed,
                expanded_flops_attended=self.layers * 2.0 * self.heads * (self.nope + self.rope + self.value),
                expanded_flops_context=self.layers * 2.0 * self.heads * self.rank * (self.nope + self.value),
                bytes_context=latents,
                bytes_token=kv,
            )
        # Sparse kernels gather latents, so they compute the absorbed form only.
        return AttentionWork(
            flops_selected=absorbed,
            bytes_selected=latents,
            bytes_token=kv,
            indexer_flops=self.indexer.layers * 2.0 * self.indexer.heads * self.indexer.dim,
            indexer_bytes=float(self.indexer.layers * self._index_bytes(dtype)),
        )


@dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4: every layer sees a window; some also entries that stand for `fine` or `coarse` tokens each.

    One vector of head_dim is key and value of all heads. Of the fine entries (CSA) an indexer keeps `index_top_k`;
    coarse ones (HCA) are all attended. fp8 entries take 584 bytes, their index keys 132.
    state_bytes: compressor windows and sliding-window rows of a running request.
    """

    layers: int
    hidden: int
    heads: int
    query_rank: int
    output_groups: int
    output_rank: int
    fine_layers: int
    coarse_layers: int
    index_heads: int
    index_top_k: int
    state_bytes: int
    head_dim: int = 512
    index_dim: int = 128
    window: int = 128
    fine: int = 4
    coarse: int = 128
    kv_heads: int = 1

    @property
    def top_k(self) -> int:
        return self.index_top_k * self.fine

    @property
    def sharded_parameters(self) -> int:
        query = self.query_rank * self.heads * self.head_dim
        grouped = self.heads * self.head_dim * self.output_rank
        return self.layers * (query + grouped + self.output_groups * self.output_rank * self.hidden)

    @property
    def replicated_parameters(self) -> int:
        down = self.layers * self.hidden * (self.query_rank + self.head_dim)
        coarse = self.coarse_layers * self.hidden * 2 * self.head_dim
        compressors = self.hidden * 4 * (self.head_dim + self.index_dim)  # two series, values and gates
        index = self.index_heads * (self.query_rank * self.index_dim + self.hidden)
        return down + coarse + self.fine_layers * (compressors + index)

    @property
    def operators(self) -> int:
        # As MLA; streams are mixed twice a layer, a compressor takes two, the indexer six.
        return self.layers * 14 + self.coarse_layers * 2 + self.fine_layers * 10

    def _entry(self, dtype: str) -> int:
        return _entry_bytes({"bf16": 2 * self.head_dim, "fp8": 584}, dtype)

    def _index_bytes(self, dtype: str) -> int:
        return _entry_bytes({"bf16": 2 * self.index_dim, "fp8": self.index_dim + 4}, dtype)

    def kv_bytes(self, dtype: str) -> float:
        fine = self.fine_layers * (self._entry(dtype) + self._index_bytes(dtype)) / self.fine
        return fine + self.coarse_layers * self._entry(dtype) / self.coarse

    def row_bytes(self, dtype: str) -> int:
        return self.state_bytes

    def work(self, dtype: str) -> AttentionWork:
        pair = 4.0 * self.heads * self.head_dim
        entry = self._entry(dtype)
        return AttentionWork(
            flops_attended=self.coarse_layers * pair / self.coarse,
            flops_selected=self.fine_layers * pair / self.fine,
            flops_token=self.layers * pair * self.window,
            bytes_context=self.coarse_layers * entry / self.coarse,
            bytes_selected=self.fine_layers * entry / self.fine,
            bytes_row=float(self.layers * self.window * entry),
            bytes_token=self.kv_bytes(dtype) + self.layers * entry,
            indexer_flops=self.fine_layers * 2.0 * self.index_heads * self.index_dim / self.fine,
            indexer_bytes=self.fine_layers * self._index_bytes(dtype) / self.fine,
        )
