"""Model presets: shapes from which weights, KV bytes and operations follow, and where they are from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kllm.costs.attention import Attention, CompressedAttention, GroupedAttention, Indexer, LatentAttention
from kllm.costs.errors import CostError, UnknownNameError

_REFERENCE = "the project's reference of models and algorithms"
_PUBLIC = "the public configuration, from memory"


@dataclass(frozen=True)
class Experts:
    """The mixture of a MoE layer: `chosen` of `count` routed experts for each token, and `shared` for all of them."""

    layers: int
    count: int
    chosen: int
    shared: int
    intermediate: int

    def expert_parameters(self, hidden: int) -> int:
        """Gate, up and down of one expert of one layer."""
        return 3 * hidden * self.intermediate


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder. Parameters are counted without norms and biases.

    dense_layers have an MLP of `intermediate`; the others are MoE. mtp: there is an MTP layer (MoE, with its own KV)
    that `with_mtp` can add. mtp_projection: parameters of its projection of [embedding; hidden], once it is added.
    quoted_total, quoted_active: parameters in 10^9 as others state them, to hold the count against.
    uncertain: fields whose numbers should not be relied on.
    """

    name: str
    hidden: int
    attention: Attention
    dense_layers: int
    intermediate: int
    vocab_size: int
    max_length: int
    weights_dtype: str
    kv_dtype: str
    source: str
    experts: Experts | None = None
    tied_embedding: bool = False
    mtp: bool = False
    mtp_projection: int = 0
    quoted_total: float | None = None
    quoted_active: float | None = None
    aliases: tuple[str, ...] = ()
    uncertain: frozenset[str] = field(default_factory=frozenset)

    @property
    def layers(self) -> int:
        return self.attention.layers

    @property
    def top_k(self) -> int | None:
        """Tokens a token attends to at most, for StepWork.add; None: all of them."""
        return self.attention.top_k

    @property
    def dense_parameters(self) -> int:
        """MLPs of the dense layers."""
        return self.dense_layers * 3 * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        """Shared experts."""
        if self.experts is None:
            return 0
        return self.experts.layers * self.experts.shared * self.experts.expert_parameters(self.hidden)

    @property
    def routed_parameters(self) -> int:
        """Routed experts."""
        if self.experts is None:
            return 0
        return self.experts.layers * self.experts.count * self.experts.expert_parameters(self.hidden)

    @property
    def router_parameters(self) -> int:
        return self.experts.layers * self.experts.count * self.hidden if self.experts else 0

    @property
    def vocabulary_parameters(self) -> int:
        """Embedding and head, which may be one matrix."""
        return self.vocab_size * self.hidden * (1 if self.tied_embedding else 2)

    @property
    def parameters(self) -> int:
        """All; the MTP layer's only after `with_mtp`."""
        attention = self.attention.sharded_parameters + self.attention.replicated_parameters
        mlps = self.dense_parameters + self.shared_parameters + self.routed_parameters + self.router_parameters
        return attention + mlps + self.mtp_projection + self.vocabulary_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: all but the embedding and the experts not chosen."""
        idle = self.routed_parameters
        if self.experts is not None:
            idle -= idle * self.experts.chosen // self.experts.count
        return self.parameters - idle - (0 if self.tied_embedding else self.vocab_size * self.hidden)

    def with_mtp(self) -> ModelSpec:
        """With its MTP layer as one layer more. Raises CostError if there is none, or it is not modelled."""
        if not self.mtp or self.experts is None or not isinstance(self.attention, LatentAttention):
            raise CostError(f"{self.name} has no MTP layer here")
        return replace(
            self,
            mtp=False,
            mtp_projection=2 * self.hidden * self.hidden,
            attention=self.attention.with_layer(),
            experts=replace(self.experts, layers=self.experts.layers + 1),
        )


SMOLLM2_135M = ModelSpec(
    name="smollm2-135m",
    aliases=("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    hidden=576,
    attention=GroupedAttention(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64),
    dense_layers=30,
    intermediate=1536,
    vocab_size=49152,
    max_length=8192,
    tied_embedding=True,
    weights_dtype="bf16",
    kv_dtype="bf16",
    quoted_total=0.1345,
    source=_REFERENCE,
)
LLAMA_70B = ModelSpec(
    name="llama-70b",
    aliases=("llama-3-70b", "llama-3.1-70b", "llama-3.3-70b", "llama3-70b"),
    hidden=8192,
    attention=GroupedAttention(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128),
    dense_layers=80,
    intermediate=28672,
    vocab_size=128256,
    max_length=131072,
    weights_dtype="bf16",
    kv_dtype="bf16",
    quoted_total=70.6,
    source=f"{_PUBLIC} of Llama 3.1 70B",
)
DEEPSEEK_V3 = ModelSpec(
    name="deepseek-v3",
    aliases=("deepseek-r1", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
    hidden=7168,
    attention=LatentAttention(layers=61, hidden=7168, heads=128, query_rank=1536, nope=128, value=128),
    dense_layers=3,
    intermediate=18432,
    experts=Experts(layers=58, count=256, chosen=8, shared=1, intermediate=2048),
    vocab_size=129280,
    max_length=163840,
    weights_dtype="fp8",
    kv_dtype="fp8",
    mtp=True,
    quoted_total=671.0,
    quoted_active=36.5,
    source=f"{_REFERENCE}; hidden, dense MLP, query rank, expert width and vocabulary: {_PUBLIC}",
)
GLM_5_2 = ModelSpec(
    name="glm-5.2",
    aliases=("glm5.2", "zai-org/GLM-5.2"),
    hidden=6144,
    attention=LatentAttention(
        layers=78,
        hidden=6144,
        heads=64,
        query_rank=2048,
        nope=192,
        value=256,
        indexer=Indexer(layers=21, heads=32, top_k=2048),
    ),
    dense_layers=3,
    intermediate=12288,
    experts=Experts(layers=75, count=256, chosen=8, shared=1, intermediate=2048),
    vocab_size=154880,
    max_length=1_048_576,
    weights_dtype="fp8",
    kv_dtype="fp8",
    mtp=True,
    quoted_total=743.4,
    quoted_active=40.2,
    source=_REFERENCE,
)
KIMI_K2 = ModelSpec(
    name="kimi-k2",
    aliases=("moonshotai/Kimi-K2-Instruct",),
    hidden=7168,
    attention=LatentAttention(layers=61, hidden=7168, heads=64, query_rank=1536, nope=128, value=128),
    dense_layers=1,
    intermediate=18432,
    experts=Experts(layers=60, count=384, chosen=8, shared=1, intermediate=2048),
    vocab_size=163840,
    max_length=131072,
    weights_dtype="fp8",
    kv_dtype="fp8",
    quoted_total=1026.0,
    quoted_active=31.5,
    source=f"{_REFERENCE} (itself from memory); the widths: {_PUBLIC}",
    uncertain=frozenset({"max_length", "intermediate", "attention", "experts"}),
)
DEEPSEEK_V4_FLASH = ModelSpec(
    name="deepseek-v4-flash",
    aliases=("deepseek-ai/DeepSeek-V4-Flash",),
    hidden=4096,
    attention=CompressedAttention(
        layers=43,
        hidden=4096,
        heads=64,
        query_rank=1024,
        output_groups=8,
        output_rank=1024,
        fine_layers=21,
        coarse_layers=20,
        index_heads=64,
        index_top_k=512,
        state_bytes=15_400_000,
    ),
    dense_layers=0,
    intermediate=0,
    experts=Experts(layers=43, count=256, chosen=6, shared=1, intermediate=2048),
    vocab_size=129280,
    max_length=1_048_576,
    weights_dtype="fp4",
    kv_dtype="fp8",
    quoted_total=284.0,
    quoted_active=13.0,
    source=f"{_REFERENCE}; it quotes 6,880 and about 5,500 bytes of bf16 KV a token",
    uncertain=frozenset({"attention"}),
)

MODELS = {model.name: model for model in (SMOLLM2_135M, LLAMA_70B, DEEPSEEK_V3, GLM_5_2, KIMI_K2, DEEPSEEK_V4_FLASH)}
_BY_ALIAS = {alias.lower(): model for model in MODELS.values() for alias in (model.name, *model.aliases)}


def find_model(name: str) -> ModelSpec:
    """The preset of this name or alias, whatever its case. Raises UnknownNameError."""
    try:
        return _BY_ALIAS[name.lower()]
    except KeyError:
        raise UnknownNameError("model", name, MODELS) from None
