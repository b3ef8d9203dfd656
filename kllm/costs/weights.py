"""RankWeights: the weights that one GPU of a layout keeps."""

from __future__ import annotations

from dataclasses import dataclass

from kllm.costs.formats import BYTES_PER_PARAMETER, find_weight_format
from kllm.costs.layout import Layout
from kllm.costs.model_specs import ModelSpec


@dataclass(frozen=True)
class Matrices:
    """Parameters on one GPU and the precision they are kept in."""

    parameters: float
    precision: str

    @property
    def bytes(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER[self.precision]


@dataclass(frozen=True)
class RankWeights:
    """attention: sharded and replicated matrices. mlp: dense MLPs and shared experts. routed: routed experts.
    routers: with the MTP layer's projection, always bf16. embedding, head: head is empty if it is the embedding."""

    attention: Matrices
    mlp: Matrices
    routed: Matrices
    routers: Matrices
    embedding: Matrices
    head: Matrices

    @property
    def bytes(self) -> float:
        parts = (self.attention, self.mlp, self.routed, self.routers, self.embedding, self.head)
        return sum(part.bytes for part in parts)


def rank_weights(model: ModelSpec, layout: Layout, weights_dtype: str) -> RankWeights:
    """What each GPU keeps (all of them the same). Raises UnknownNameError for the format."""
    kept_as = find_weight_format(weights_dtype)
    attention = model.attention.sharded_parameters / layout.tp + model.attention.replicated_parameters
    table = model.vocab_size * model.hidden / layout.gpus
    return RankWeights(
        attention=Matrices(attention, kept_as.attention),
        mlp=Matrices((model.dense_parameters + model.shared_parameters) / layout.tp, kept_as.mlp),
        routed=Matrices(model.routed_parameters / layout.gpus, kept_as.experts),
        routers=Matrices(model.router_parameters + model.mtp_projection, "bf16"),
        embedding=Matrices(table, kept_as.vocabulary),
        head=Matrices(0 if model.tied_embedding else table, kept_as.vocabulary),
    )
