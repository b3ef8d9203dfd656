"""A GGUF's metadata as a Hugging Face config. Architectures: llama and qwen3."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from kllm.hub.gguf import GGUFFile
from kllm.hub.source import ModelSourceError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TIED = "output.weight"
_BIASES = {f"attn_{part}": "attention_bias" for part in ("q", "k", "v", "output")} | {
    f"ffn_{part}": "mlp_bias" for part in ("gate", "up", "down")
}
"""Which flag of the config says that a matrix has a bias."""

# Mostly factors of the rotation's amplitude. llama.cpp applies attn_factor whatever the type of scaling.
_UNUSED_OF_ANY_SCALING: dict[str, tuple[float, ...]] = {"attn_factor": (1.0,)}
_UNUSED_OF_YARN: dict[str, tuple[float, ...]] = {
    "yarn_attn_factor": (1.0,),
    "yarn_log_multiplier": (0.0,),
    "yarn_ext_factor": (1.0, -1.0),  # -1: that of the type
}


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """The config of the model in the file, in the form of `normalise_config`.

    Raises ModelSourceError for an architecture that is not known and for metadata missing or out of bounds."""
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelSourceError(f"{file.path}: unknown architecture {arch!r}, known are {', '.join(ARCHITECTURES)}")
    if "split.count" in file.metadata and file.get("split.count", int) > 1:
        raise ModelSourceError(f"{file.path}: one part of a split GGUF; merge the parts first")
    if file.get(f"{arch}.expert_count", int, 0) > 0:
        raise ModelSourceError(f"{file.path}: architecture {arch} with experts is not supported")
    hidden, heads = _positive(file, f"{arch}.embedding_length"), _positive(file, f"{arch}.attention.head_count")
    head_dim = _head_dim(file, arch, hidden // heads)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": _positive(file, f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _positive(file, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _positive(file, f"{arch}.feed_forward_length"),
        "max_position_embeddings": _positive(file, f"{arch}.context_length"),
        "rms_norm_eps": _short_float(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(file, arch, head_dim),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": _TIED not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": arch == "llama" and "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    for key in ("bos", "eos", "pad"):
        if (token := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    _check_biases(file, config)
    return config


def _check_biases(file: GGUFFile, config: dict[str, Any]) -> None:
    """A bias that the config does not tell of would never be read, and the output be wrong without a word."""
    for name in file.tensors:
        stem, _, suffix = name.rpartition(".")
        if suffix == "bias" and not config.get(_BIASES.get(stem.rpartition(".")[2], ""), False):
            raise ModelSourceError(
                f"{file.path}: bias {name} is not supported (only biases of all attention or all MLP matrices together)"
            )


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, int, default)
    if not 0 < value < 1 << 31:
        raise ModelSourceError(f"{file.path}: metadata key {key} is {value}")
    return value


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelSourceError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _head_dim(file: GGUFFile, arch: str, default: int) -> int:
    head_dim = _positive(file, f"{arch}.attention.key_length", default)
    rotated = file.get(f"{arch}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ModelSourceError(f"{file.path}: RoPE over {rotated} of {head_dim} dimensions is not supported")
    return head_dim


def _rope(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any]:
    """As llama.cpp reads it: a factor without a type means linear, and one of 0 or 1 that nothing is scaled."""
    theta = _short_float(file.get(f"{arch}.rope.freq_base", float, 10000.0))
    kind, factor = _rope_scaling(file, arch)
    _refuse_unused(file, f"{arch}.rope.scaling", _UNUSED_OF_ANY_SCALING)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ModelSourceError(f"{file.path}: RoPE scaling {kind!r} on top of rope_freqs.weight is not supported")
        return _llama3_rope(file, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return {**rope, **_yarn(file, arch)} if kind == "yarn" else rope


def _rope_scaling(file: GGUFFile, arch: str) -> tuple[str, float]:
    """(type, factor); the factor is 0 where the type is none."""
    kind = file.get(f"{arch}.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelSourceError(f"{file.path}: RoPE scaling {kind!r} is not supported")
    old_key = file.get(f"{arch}.rope.scale_linear", float, 0.0)
    factor = _short_float(file.get(f"{arch}.rope.scaling.factor", float, old_key))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return "none", 0.0
    if factor == 0.0:
        raise ModelSourceError(f"{file.path}: RoPE scaling {kind!r} without a factor")
    return kind, factor


def _yarn(file: GGUFFile, arch: str) -> dict[str, Any]:
    """YaRN's own settings. Those that the rotation here does not have are refused unless they change nothing."""
    prefix = f"{arch}.rope.scaling"
    _refuse_unused(file, prefix, _UNUSED_OF_YARN)
    context = _positive(file, f"{arch}.context_length")
    yarn: dict[str, Any] = {
        "original_max_position_embeddings": _positive(file, f"{prefix}.original_context_length", context)
    }
    for beta in ("beta_fast", "beta_slow"):
        if f"{prefix}.yarn_{beta}" in file.metadata:
            yarn[beta] = _short_float(file.get(f"{prefix}.yarn_{beta}", float))
    return yarn


def _refuse_unused(file: GGUFFile, prefix: str, neutral: Mapping[str, tuple[float, ...]]) -> None:
    """neutral: of each key, the values that mean the same as no such key; the first is what an absent one is."""
    for key, values in neutral.items():
        value = file.get(f"{prefix}.{key}", float, values[0])
        if value not in values:
            raise ModelSourceError(f"{file.path}: metadata key {prefix}.{key} is {value:g}, which is not supported")


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling: the file holds only what each frequency is divided by, one float per pair of dimensions.

    Every published Llama 3 uses the same band (1 to 4 turns in 8192 positions) and differs in the factor, which is
    the divisor of the slowest frequency. Anything that this does not reproduce is refused rather than approximated."""
    info = file.tensors["rope_freqs.weight"]
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise ModelSourceError(f"{file.path}: tensor rope_freqs.weight is {info.type.name} {list(info.shape)}")
    divisors = struct.unpack_from(f"<{head_dim // 2}f", file.data, info.start)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": _short_float(divisors[-1]),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for index, divisor in enumerate(divisors):
        turns = 8192 * theta ** (-2 * index / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        expected = 1 / ((1 - smooth) / divisors[-1] + smooth) if divisors[-1] else math.nan
        if not math.isclose(divisor, expected, rel_tol=1e-3):
            raise ModelSourceError(f"{file.path}: tensor rope_freqs.weight is not Llama 3's scaling")
    return rope


def _short_float(value: float) -> float:
    """A float32 as the shortest decimal that means it: 9.999999747378752e-06 is 1e-05 in config.json."""
    short = float(f"{value:.7g}")
    same = struct.pack("<f", short) == struct.pack("<f", value)
    return short if same else value
