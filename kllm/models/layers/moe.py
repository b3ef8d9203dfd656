"""Mixture of experts with DeepSeek's bias-corrected, group-limited routing ("noaux_tc") and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import ExpertWeights, Operators
from kllm.models.layers.mlp import Mlp, read_mlp
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Routing:
    """E experts in `groups` equal groups; the best `top_groups` groups take part, top_k experts are chosen."""

    experts: int
    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    factor: float

    def choose(self, scores: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """scores float32 [T, E] in (0, 1), bias [E] to (indices int64 [T, k], weights float32 [T, k]).

        The bias decides who is chosen and never enters the weights. A group counts by its two best experts."""
        choice = scores + bias
        if self.groups > 1:
            by_group = choice.unflatten(1, (self.groups, -1))
            best = by_group.topk(min(2, by_group.shape[2]), dim=-1).values
            group_score = best[..., 0] + best[..., -1] if best.shape[2] > 1 else best[..., 0]
            kept = group_score.topk(self.top_groups, dim=-1, sorted=False).indices
            dropped = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, kept, False)
            choice = by_group.masked_fill(dropped.unsqueeze(2), float("-inf")).flatten(1)
        indices = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, indices)
        if self.normalise:
            weights = weights / (_sum_columns(weights) + 1e-20)
        return indices, weights * self.factor


def read_routing(config: ModelConfig) -> Routing:
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    experts, groups = config.integer("n_routed_experts"), config.integer("n_group", 1)
    top_groups, top_k = config.integer("topk_group", 1), config.integer("num_experts_per_tok")
    if experts % groups:
        raise config.error("n_group", f"must divide n_routed_experts ({experts}), got {groups}")
    if top_groups > groups:
        raise config.error("topk_group", f"must be at most n_group ({groups}), got {top_groups}")
    if top_k > experts // groups * top_groups:
        raise config.error("num_experts_per_tok", f"exceeds the experts of topk_group groups, got {top_k}")
    normalise = config.boolean("norm_topk_prob", True)
    return Routing(experts, top_k, groups, top_groups, normalise, config.number("routed_scaling_factor", 1.0))


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """gate float32 [E, hidden], bias float32 [E]; shared: experts every token goes through, as one MLP."""

    operators: Operators
    routing: Routing
    gate: LinearWeight
    bias: torch.Tensor
    experts: ExpertWeights
    shared: Mlp | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        indices, weights = self.routing.choose(self.operators.expert_scores(x, self.gate), self.bias)
        routed = self.operators.moe(x, self.experts, indices, weights)
        return routed if self.shared is None else routed + self.shared(x)


def read_moe(
    reader: TensorReader, prefix: str, routing: Routing, hidden: int, inner: int, shared_experts: int
) -> MoeMlp:
    """From `{prefix}gate`, `experts.N.*` and `shared_experts.*`; inner: size of one expert."""
    mlps = [read_mlp(reader, f"{prefix}experts.{e}.", hidden, inner) for e in range(routing.experts)]
    shared = read_mlp(reader, f"{prefix}shared_experts.", hidden, inner * shared_experts) if shared_experts else None
    return MoeMlp(
        reader.operators,
        routing,
        reader.linear([f"{prefix}gate"], [routing.experts], hidden, dtype=torch.float32),
        reader.tensor(f"{prefix}gate.e_score_correction_bias", routing.experts, dtype=torch.float32),
        ExpertWeights(tuple(mlp.gate_up for mlp in mlps), tuple(mlp.down for mlp in mlps)),
        shared,
    )


def _sum_columns(x: torch.Tensor) -> torch.Tensor:
    """[T, k] to [T, 1], added from left to right: torch's own sum orders its additions by T."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total
