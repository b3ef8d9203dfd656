"""The operators a model is made of. One interface; implementations differ in speed and in what they promise.

Letters in shapes: T tokens of the step, H query heads, Hkv key/value heads, D head size, R latent rank of MLA,
dn / dr / dv its no-position, rotary and value head sizes, E experts, k experts per token, F inner size of an MLP.

A KV cache is a tensor [blocks, block_tokens, ...]. Entries beyond a row's context have no part in its results, whatever
they are: blocks come with what their last owner left there, which may be NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from kllm.kernels import linear
from kllm.kernels.batch import ForwardBatch
from kllm.kernels.linear import LinearWeight, WeightSource

MlaForm = Literal["auto", "absorbed", "expanded"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of the tokens of one step, over vectors of size D.

    cos, sin: [T, 1, D] in the type of the vectors, such that rotated = x * cos + swapped(x) * sin, where swapped
    exchanges the two elements of each pair and sin carries the sign.
    interleaved: pairs are (2i, 2i+1), else (i, i + D/2).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The two halves of MLA's kv_b projection: key [H, dn, R] and value [H, dv, R]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Per expert: gate and up stacked [2F, hidden], and down [hidden, F]."""

    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows [vocab, hidden]; `data` is the implementation's own, looked-up vectors have `dtype`."""

    data: Any
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer with grouped-query attention and a gated MLP. Norms float [hidden], head norms [head_dim] or None,
    biases [outputs of their matrix] or None. qkv: query, key and value stacked; gate_up: gate and up stacked."""

    attention_norm: torch.Tensor
    qkv: LinearWeight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: LinearWeight
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: LinearWeight
    gate_up_bias: torch.Tensor | None
    down: LinearWeight
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DenseShape:
    """cos, sin: [positions, head_dim] as in Rotation, half-split pairs. final_norm: weight [hidden] of the norm after
    the last layer. dtype: of rounded activations."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    final_norm: torch.Tensor
    dtype: torch.dtype


class DenseStack(Protocol):
    """All layers of a dense decoder in one call."""

    def __call__(
        self, tokens: torch.Tensor, batch: ForwardBatch, cache: Mapping[str, Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """tokens int64 [T] to final hidden states of the wanted tokens (after the last norm): float32 [W, hidden].
        cache: records k and v (int8: k_scale and v_scale too), one tensor per layer, the same ones at every call."""
        ...


class Operators(ABC):
    """Stateless apart from constants; safe to share between models. Nothing is changed in place but `cache`
    in write_kv; per-step metadata is kept in `batch.derived`. Results have the type of the input unless stated."""

    name: ClassVar[str]
    quantized_formats: ClassVar[frozenset[str]] = frozenset()  # of QuantizedRows that pack_linear takes

    def describe(self) -> str:
        """For the operator of a server: what computes here."""
        return self.name

    def numerics(self) -> str:
        """Names the arithmetic: where it is the same, so are the results, bit for bit."""
        return self.name

    def pack_linear(self, *parts: WeightSource, gated: bool = False) -> LinearWeight:
        """Parts [out_i, in], stacked along their outputs, in the layout that `linear` reads; the arguments may be
        dropped afterwards. gated: two parts of equal size, whose product goes through swiglu."""
        return linear.pack(parts)

    def pack_embedding(self, rows: WeightSource, dtype: torch.dtype, head: LinearWeight | None) -> EmbeddingTable:
        """rows [vocab, hidden]. head: these very rows packed as the output head, where the model ties the two."""
        if not isinstance(rows, torch.Tensor):
            raise TypeError("operators in torch take float weights")
        return EmbeddingTable(rows, dtype)

    def dense_stack(
        self, shape: DenseShape, layers: Sequence[DenseLayer], embedding: EmbeddingTable
    ) -> DenseStack | None:
        """The layers as one call, or None: then the model goes through the operators one by one."""
        return None

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] to [T, out]; bias [out]."""

    @abstractmethod
    def embedding(self, tokens: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        """tokens int64 [T] to [T, hidden]."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32. x [..., n], weight [n]."""

    @abstractmethod
    def rope(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, heads, D], each head rotated. Pairs stay where they are."""

    @abstractmethod
    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2F], gate then up, to silu(gate) · up [T, F]."""

    @abstractmethod
    def write_kv(self, cache: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes values [T, *entry], in the cache's type, into cache [blocks, block_tokens, *entry] at batch.slots."""

    @abstractmethod
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
        """Causal attention of every token to its own row's cached tokens up to itself.

        q [T, H, D], caches [blocks, block_tokens, Hkv, D] holding the step's own tokens too. Query head h reads
        KV head h // (H / Hkv). Returns [T, H, D].

        k_scales, v_scales: float32 [blocks, block_tokens, Hkv] of int8 caches, whose vectors are value · scale.
        Caches may have another float type than q; products are then taken in either."""

    @abstractmethod
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
        """Multi-head latent attention over cache [blocks, block_tokens, R + dr] (normed latent, rotated key).

        q_nope [T, H, dn], q_rope [T, H, dr] (rotated). Returns [T, H, dv].
        absorbed: queries are mapped to the latent space and attend there; expanded: keys and values of every
        head are made from the latents; auto: what costs less for the row's number of queries."""

    @abstractmethod
    def expert_scores(self, x: torch.Tensor, gate: LinearWeight) -> torch.Tensor:
        """Router affinities sigmoid(x · gateᵀ) in float32: x [T, hidden], gate float32 [E, hidden] to [T, E]."""

    @abstractmethod
    def moe(
        self, x: torch.Tensor, experts: ExpertWeights, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Σ_j weights[t, j] · expert[indices[t, j]](x[t]): x [T, hidden], indices int64 [T, k], weights float32 [T, k].
        The sum is taken in float32."""
