"""The engines and settings that are compared, each with what it loads and what it cannot do."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A name of `--figures`, and the fields of a result that it fills. cold_start_s comes with every visit; peak_rss_mb
# with the visits that run the batch, since it is compared at 32 sequences.
FIGURES: dict[str, tuple[str, ...]] = {
    "ttft_512": ("ttft_512_ms",),
    "decode": ("decode_tokens_per_s",),
    "ttft_4096": ("ttft_4096_ms",),
    "batch": ("batch_output_tokens_per_s", "batch_total_tokens_per_s"),
    "shared": ("shared_output_tokens_per_s",),
}
STATIC_BATCH = "its static batch shares no prefixes: the same as the batch"


@dataclass(frozen=True)
class Engine:
    """One engine in one setting.

    name: for `--engines`. title and weights: `engine` and `weights` of its result; together they are unique.
    environment: virtual environment and requirements file; None is the interpreter that runs this.
    format: what it loads (see models.py). options: for its runner. leaves_out: figures that are not taken, and why.
    vendor: the only maker of processors that it is for, as /proc/cpuinfo spells it; "" for any.
    """

    name: str
    title: str
    weights: str
    runner: str
    environment: str | None
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)
    leaves_out: Mapping[str, str] = field(default_factory=dict)
    vendor: str = ""


def _kllm(name: str, weights: str, **options: str) -> Engine:
    return Engine(f"kllm-{name}", "kllm", weights, "run_kllm.py", None, "gguf", options)


def _openvino(name: str, weights: str) -> Engine:
    options = {"prefix_caching": True}
    return Engine(
        f"openvino-{name}", "openvino-genai", weights, "run_openvino.py", "openvino", f"openvino-{weights}", options
    )


_VLLM = {"dtype": "bfloat16"}
_AMD = "AuthenticAMD"
_ONE_STREAM = "measured without flash attention"

ENGINES: tuple[Engine, ...] = (
    _kllm("bf16", "bf16", dtype="bfloat16", quantization="none", kv_cache_dtype="bfloat16"),
    _kllm("int8", "int8", dtype="bfloat16", quantization="int8", kv_cache_dtype="int8"),
    _kllm("4bit", "q4_1", dtype="auto", quantization="auto", kv_cache_dtype="bfloat16"),  # as shipped
    _kllm("4bit-kv8", "q4_1, int8 KV", dtype="auto", quantization="auto", kv_cache_dtype="int8"),
    Engine("vllm-bf16", "vllm", "bf16", "run_vllm.py", "vllm", "folder", _VLLM),
    Engine(
        "vllm-bf16-zen", "vllm, zentorch", "bf16", "run_vllm.py", "vllm_zen", "folder", _VLLM, vendor="AuthenticAMD"
    ),
    _openvino("16bit", "fp16"),
    _openvino("int8", "int8"),
    Engine(
        "transformers-bf16",
        "transformers",
        "bf16",
        "run_transformers.py",
        "transformers",
        "folder",
        leaves_out={"shared": STATIC_BATCH},
    ),
    Engine("llama.cpp-q4_1", "llama.cpp", "q4_1", "run_llama_cpp.py", "llama_cpp", "gguf", {"flash_attention": 0}),
    Engine(
        "llama.cpp-q4_1-flash",
        "llama.cpp, flash attention",
        "q4_1",
        "run_llama_cpp.py",
        "llama_cpp",
        "gguf",
        {"flash_attention": 1},
        leaves_out={"batch": _ONE_STREAM, "shared": _ONE_STREAM},
    ),
    Engine(
        "ctranslate2-int8",
        "ctranslate2",
        "int8",
        "run_ctranslate2.py",
        "ctranslate2",
        "ctranslate2-int8",
        leaves_out={"shared": STATIC_BATCH},
    ),
)


def choose(patterns: str) -> list[Engine]:
    """Engines whose names match any of the comma-separated patterns; `all` and `peers` (all but ours) are groups.

    Raises ValueError for a pattern that matches nothing."""
    chosen: list[Engine] = []
    for pattern in (part.strip() for part in patterns.split(",")):
        matching = [engine for engine in ENGINES if _matches(engine, pattern)]
        if not matching:
            names = ", ".join(engine.name for engine in ENGINES)
            raise ValueError(f"no engine matches {pattern!r}; there are all, peers, {names}")
        chosen += [engine for engine in matching if engine not in chosen]
    return chosen


def _matches(engine: Engine, pattern: str) -> bool:
    if pattern in ("all", "peers"):
        return pattern == "all" or engine.title != "kllm"
    return fnmatch.fnmatchcase(engine.name, pattern)


def choose_figures(names: str) -> list[str]:
    """Comma-separated names of FIGURES, or `all`. Raises ValueError for an unknown one."""
    if names == "all":
        return list(FIGURES)
    wanted = [part.strip() for part in names.split(",")]
    if unknown := [name for name in wanted if name not in FIGURES]:
        raise ValueError(f"unknown figures {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    return [name for name in FIGURES if name in wanted]
