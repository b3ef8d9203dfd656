"""What is compared with the plain path: each feature and number format alone, and all together.

This is the one table of limits. A variant is a set of EngineConfig fields on top of PLAIN. Number formats run on the
operators that users get (`auto`); scheduling runs on `reference` alone, and on `auto` in all-float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How far a variant may be from plain.

    perplexity: relative change, either way. agreement: least share of positions with plain's most likely token.
    needles: greatest share of needles that plain finds and the variant does not, less those that only it finds.
    cached_nats: mean change of a log-probability when its context comes from the prefix cache, against the
    variant itself without. lossy: results must differ from plain's, or the option was not in force.
    """

    perplexity: float
    agreement: float
    needles: float
    cached_nats: float
    lossy: bool = True


EXACT = Limits(perplexity=0.001, agreement=0.995, needles=0.0, cached_nats=0.001, lossy=False)
FLOAT_WEIGHTS = Limits(perplexity=0.001, agreement=0.97, needles=0.12, cached_nats=0.05)
KV_INT8 = Limits(perplexity=0.002, agreement=0.97, needles=0.12, cached_nats=0.05)
ROUNDED = Limits(perplexity=0.005, agreement=0.95, needles=0.12, cached_nats=0.05)
ROUNDED_AND_KV_INT8 = Limits(perplexity=0.007, agreement=0.93, needles=0.12, cached_nats=0.05)


@dataclass(frozen=True)
class Variant:
    """options: fields of EngineConfig beside or instead of PLAIN's. quick: part of the quick selection.
    as_shipped: needs a checkpoint that keeps its weights quantised."""

    name: str
    about: str
    options: Mapping[str, Any]
    limits: Limits
    quick: bool = False
    as_shipped: bool = False

    @property
    def engine_options(self) -> dict[str, Any]:
        return {**PLAIN, **self.options}


# One request at a time, whole prompts in one step, nothing reused, everything in float32 and plain torch.
PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "kernels": "reference",
    "quantization": "none",
    "activations": "float",
    "kv_cache_dtype": "float32",
    "enable_prefix_caching": False,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8192,
    "pipeline_depth": 1,
}

_CACHING = {"enable_prefix_caching": True}
_CHUNKS = {"prefill_chunk": 96}  # neither a divisor of usual windows nor a power of two
_BATCHING = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
_DEPTH = {"pipeline_depth": 2}
_TOGETHER = {**_CACHING, **_CHUNKS, **_BATCHING, **_DEPTH, "kernels": "auto"}
_BF16 = {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
_INT8 = {"quantization": "int8", "activations": "int8"}
_SHIPPED = {"kernels": "auto", "dtype": "auto", "quantization": "auto"}
_KV_INT8 = {"kv_cache_dtype": "int8"}

_TABLE = (
    Variant("prefix-caching", "KV of prompts that start alike is reused", _CACHING, EXACT),
    Variant("chunked-prefill", "prompts computed 96 tokens at a time", _CHUNKS, EXACT),
    Variant("batching", "16 requests at once", _BATCHING, EXACT),
    Variant("pipeline-depth", "a step planned while one runs", _DEPTH, EXACT),
    Variant("cpu", "native operators in float32", {"kernels": "cpu"}, EXACT),
    Variant("bf16", "weights, activations and KV in bfloat16", {"kernels": "auto", **_BF16}, ROUNDED),
    Variant("int8", "int8 weights and activations", {"kernels": "auto", **_INT8}, ROUNDED),
    Variant("int8-float", "int8 weights, float activations", {"kernels": "auto", "quantization": "int8"}, ROUNDED),
    Variant("q8_0", "weights in blocks of 32 int8", {"kernels": "auto", **_INT8, "quantization": "q8_0"}, ROUNDED),
    Variant("shipped", "the checkpoint's own blocks, int8 activations", {**_SHIPPED, "activations": "int8"}, ROUNDED,
            as_shipped=True),
    Variant("shipped-float", "the checkpoint's own blocks, float activations", _SHIPPED, FLOAT_WEIGHTS,
            as_shipped=True),
    Variant("kv-bf16", "KV cache in bfloat16", {"kernels": "auto", "kv_cache_dtype": "bfloat16"}, KV_INT8),
    Variant("kv-int8", "KV cache in int8", {"kernels": "auto", **_KV_INT8, "activations": "int8"}, KV_INT8,
            quick=True),
    Variant("kv-int8-float", "KV cache in int8, q and probabilities in two bytes", {"kernels": "auto", **_KV_INT8},
            KV_INT8),
    Variant("all-float32", "all of scheduling and fast operators, float32", _TOGETHER, EXACT, quick=True),
    Variant("all-bf16", "all of that in bfloat16", {**_TOGETHER, **_BF16}, ROUNDED, quick=True),
    Variant("all-int8", "all of that, weights and KV in int8", {**_TOGETHER, **_INT8, **_KV_INT8},
            ROUNDED_AND_KV_INT8, quick=True),
    Variant("all-shipped", "all of that, weights as shipped, KV in int8",
            {**_TOGETHER, **_SHIPPED, "activations": "int8", **_KV_INT8}, ROUNDED_AND_KV_INT8, quick=True,
            as_shipped=True),
)  # fmt: skip
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _TABLE}
