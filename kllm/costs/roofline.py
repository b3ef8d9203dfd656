"""RooflineModel: the time of a step from what it must compute, read and send, one operator class after another.

    gemm        attention projections, dense MLPs, shared experts, routers: weights read once, or products
    moe         routed experts: those that the step's tokens reach are read once, or products
    attention   KV of the context read once, or products of queries with keys and values
    indexer     sparse attention: index keys of the context read once, or their scores
    all_reduce  two a layer within a tensor-parallel group
    all_to_all  two a MoE layer: tokens to their experts, results back
    head        weights read once, or products for the rows that sample
    launch      starting the kernels, and a part that every step has

Each class takes the longer of its memory and its compute time; classes follow one another, nothing overlaps. The
slowest GPU counts: with groups of requests (dp), that is the one with the step's longest row. Apart from that, rows are
taken to be spread evenly, and experts to be chosen independently (with `expert_imbalance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kllm.costs.hardware import Hardware
from kllm.costs.layout import Layout
from kllm.costs.model_specs import ModelSpec
from kllm.costs.step import StepWork
from kllm.costs.weights import RankWeights, rank_weights

OPERATOR_CLASSES = ("gemm", "moe", "attention", "indexer", "all_reduce", "all_to_all", "head", "launch")


@dataclass(frozen=True)
class Efficiencies:
    """Parts of the hardware's peaks that are reached, and fixed times.

    memory, attention_memory: of bandwidth, for weights and for KV. gemm, experts, attention: of the dense rate.
    link: of NVLink or NIC. link_latency_s: per collective.
    operator_s: per kernel; graph_operator_s: the same in steps of at most graph_tokens tokens, which replay captured
    graphs. step_s: whatever every step costs besides.
    expert_imbalance: tokens of the busiest GPU's experts over the mean.
    """

    memory: float
    attention_memory: float
    gemm: float
    experts: float
    attention: float
    link: float
    link_latency_s: float
    operator_s: float
    graph_operator_s: float
    graph_tokens: int
    step_s: float
    expert_imbalance: float


# memory, 3 µs per operator and 10 µs per transfer: the control-plane reference. The compute efficiencies are set so
# that prefill of a dense 70 B model on 8 H100 has a model FLOP utilisation of about 0.45, as given there, collectives
# included. Graphs up to 512 tokens, 1 µs a kernel in them and an imbalance of 1.2 are assumptions.
GPU_EFFICIENCIES = Efficiencies(
    memory=0.8,
    attention_memory=0.8,
    gemm=0.65,
    experts=0.6,
    attention=0.6,
    link=0.9,
    link_latency_s=10e-6,
    operator_s=3e-6,
    graph_operator_s=1e-6,
    graph_tokens=512,
    step_s=0.0,
    expert_imbalance=1.2,
)
# "Where a step's time goes" in docs/performance.md: products at 90 % of the registers' rate, attention at two thirds of
# it, KV read at 40 % of the bandwidth, 0.75 ms a step for batch, sampler and results. All layers are one native call.
CPU_EFFICIENCIES = Efficiencies(
    memory=0.8,
    attention_memory=0.4,
    gemm=0.9,
    experts=0.9,
    attention=0.65,
    link=1.0,
    link_latency_s=0.0,
    operator_s=0.0,
    graph_operator_s=0.0,
    graph_tokens=0,
    step_s=0.75e-3,
    expert_imbalance=1.0,
)
EFFICIENCIES = {"gpu": GPU_EFFICIENCIES, "cpu": CPU_EFFICIENCIES}


class RooflineModel:
    """Implements StepTimeModel for one instance of `model` in `layout`.

    weights_dtype, kv_dtype: the model's usual formats if not given. factors: multiply the time of operator classes.
    Raises CostError if the layout does not suit the model or the hardware.
    """

    def __init__(
        self,
        hardware: Hardware,
        model: ModelSpec,
        layout: Layout,
        *,
        weights_dtype: str | None = None,
        kv_dtype: str | None = None,
        efficiencies: Efficiencies | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        layout.check(model, hardware)
        self.hardware = hardware
        self.model = model
        self.layout = layout
        self.weights_dtype = weights_dtype or model.weights_dtype
        self.kv_dtype = kv_dtype or model.kv_dtype
        self.efficiencies = efficiencies or EFFICIENCIES[hardware.processor]
        self.factors = dict.fromkeys(OPERATOR_CLASSES, 1.0) | dict(factors or {})
        if unknown := self.factors.keys() - set(OPERATOR_CLASSES):
            raise ValueError(f"no operator classes: {', '.join(sorted(unknown))}")
        self._set_products(rank_weights(model, layout, self.weights_dtype))
        self._set_attention()
        self._set_collectives()
        self._set_launch()

    def seconds(self, work: StepWork) -> float:
        """Seconds that the step takes."""
        return sum(self._terms(work))

    def breakdown(self, work: StepWork) -> dict[str, float]:
        """Seconds by operator class; their sum is what `seconds` gives."""
        return dict(zip(OPERATOR_CLASSES, self._terms(work), strict=True))

    def scaled(self, factors: Mapping[str, float]) -> RooflineModel:
        """The same, with the time of these operator classes multiplied."""
        return RooflineModel(
            self.hardware,
            self.model,
            self.layout,
            weights_dtype=self.weights_dtype,
            kv_dtype=self.kv_dtype,
            efficiencies=self.efficiencies,
            factors=dict(factors) | {name: factor * factors.get(name, 1.0) for name, factor in self.factors.items()},
        )

    def _set_products(self, weights: RankWeights) -> None:
        """Seconds to read each class's weights, and per token to multiply with them."""
        peak, reached = self.hardware, self.efficiencies
        read = 1 / (peak.memory_gb_s * 1e9 * reached.memory)
        dense = (weights.attention, weights.mlp, weights.routers)
        gemm = self.factors["gemm"]
        self._gemm_read = gemm * read * sum(part.bytes for part in dense)
        self._gemm_token = gemm * sum(2 * part.parameters / peak.flops(part.precision) for part in dense) / reached.gemm
        self._expert_read = self._expert_token = self._miss = 0.0
        if experts := self.model.experts:
            chosen = experts.chosen / experts.count
            imbalance = reached.expert_imbalance if self.layout.ep > 1 else 1.0
            rate = peak.flops(weights.routed.precision) * reached.experts
            self._miss = math.log1p(-chosen)  # log of the probability that one token does not reach an expert
            self._expert_read = self.factors["moe"] * read * weights.routed.bytes
            self._expert_token = self.factors["moe"] * imbalance * chosen * 2 * weights.routed.parameters / rate
        table = weights.embedding if self.model.tied_embedding else weights.head
        self._head_read = self.factors["head"] * read * table.bytes
        self._head_row = self.factors["head"] * 2 * table.parameters / (peak.flops(table.precision) * reached.gemm)

    def _set_attention(self) -> None:
        """Seconds per unit of each of StepWork's sums, for one GPU's heads and its part of the KV."""
        cost = self.model.attention.work(self.kv_dtype)
        peak, reached, factor = self.hardware, self.efficiencies, self.factors["attention"]
        flop = factor / (peak.flops("bf16") * reached.attention * self.layout.tp)
        read = factor / (peak.memory_gb_s * 1e9 * reached.attention_memory * self.layout.kv_shards(self.model))
        self._pairs = (flop * cost.flops_attended, flop * cost.flops_selected, flop * cost.flops_token)
        self._expanded = (flop * cost.expanded_flops_attended, flop * cost.expanded_flops_context)
        self._kv_read = (read * cost.bytes_context, read * cost.bytes_selected, read * cost.bytes_row)
        self._kv_write = read * cost.bytes_token
        # Every GPU of a group scores with all of the index heads: the index is replicated.
        scores = peak.flops("fp8" if self.kv_dtype == "fp8" else "bf16") * reached.gemm
        keys = peak.memory_gb_s * 1e9 * reached.attention_memory
        self._index_pair = self.factors["indexer"] * cost.indexer_flops / scores
        self._index_read = self.factors["indexer"] * cost.indexer_bytes / keys

    def _set_collectives(self) -> None:
        """Seconds per collective step and per token. A layout over several nodes sends part of it over the NICs."""
        layout, peak, reached = self.layout, self.hardware, self.efficiencies
        self._reduce_fixed = self._reduce_token = self._exchange_fixed = self._exchange_token = 0.0
        if layout.tp > 1 and peak.nvlink_gb_s is not None:
            count = 2 * self.model.layers * self.factors["all_reduce"]
            sent = 2 * (layout.tp - 1) / layout.tp * self.model.hidden * 2  # a ring, bf16
            self._reduce_fixed = count * reached.link_latency_s
            self._reduce_token = count * sent / (peak.nvlink_gb_s * 1e9 * reached.link)
        if layout.dp > 1 and peak.nvlink_gb_s is not None and self.model.experts is not None:
            count = 2 * self.model.experts.layers * self.factors["all_to_all"]
            gpus, node = layout.gpus, min(layout.gpus, peak.gpus_per_node)
            # A token goes once to every GPU that has one of its experts: fp8 there, bf16 back. Half of both each way.
            reached_gpus = gpus * (1 - (1 - 1 / gpus) ** self.model.experts.chosen)
            sent = reached_gpus * self.model.hidden * (1 + 2) / 2 / layout.tp
            near = sent * (node - 1) / gpus / (peak.nvlink_gb_s * 1e9)
            far = sent * (gpus - node) / gpus / (peak.nic_gb_s * 1e9) if peak.nic_gb_s is not None else 0.0
            self._exchange_fixed = count * reached.link_latency_s
            self._exchange_token = count * max(near, far) / reached.link

    def _set_launch(self) -> None:
        model, reached, factor = self.model, self.efficiencies, self.factors["launch"]
        # Dense MLP: norm, gate and up, activation, down. MoE: norm, router, top-k, permute, two grouped products,
        # activation, combine, and three for shared experts. Around them embedding, final norm, head and the sampler.
        moe_layers = model.experts.layers if model.experts is not None else 0
        operators = model.attention.operators + 4 * model.dense_layers + 11 * moe_layers + 20
        self._graph_tokens = reached.graph_tokens
        self._launch_graph = factor * (reached.step_s + operators * reached.graph_operator_s)
        self._launch_eager = factor * (reached.step_s + operators * reached.operator_s)

    def _terms(self, work: StepWork) -> tuple[float, ...]:
        """In the order of OPERATOR_CLASSES."""
        new_tokens = work.new_tokens
        tokens: float = new_tokens
        rows: float = work.rows
        context: float = work.context
        attended: float = work.attended
        selected: float = work.selected
        if self.layout.dp > 1:
            tokens = max(new_tokens / self.layout.dp, work.longest)
            share = tokens / new_tokens if new_tokens else 1.0
            rows, context, attended, selected = rows * share, context * share, attended * share, selected * share
        pair, chosen_pair, near_pair = self._pairs
        products = pair * attended + chosen_pair * selected + near_pair * tokens
        expanded_pair, expanded_context = self._expanded
        if expanded_pair:
            products = min(products, expanded_pair * attended + expanded_context * context)
        all_kv, selected_kv, row_kv = self._kv_read
        reads = all_kv * context + selected_kv * min(selected, context) + row_kv * rows + self._kv_write * tokens
        moe = 0.0
        if self._expert_read:
            touched = 1.0 - math.exp(self._miss * new_tokens)
            moe = max(self._expert_read * touched, self._expert_token * new_tokens)
        return (
            max(self._gemm_read, self._gemm_token * tokens),
            moe,
            max(products, reads),
            max(self._index_pair * attended, self._index_read * context),
            self._reduce_fixed + self._reduce_token * tokens,
            self._exchange_fixed + self._exchange_token * tokens,
            max(self._head_read, self._head_row * work.sampled) if work.sampled else 0.0,
            self._launch_graph if new_tokens <= self._graph_tokens else self._launch_eager,
        )
