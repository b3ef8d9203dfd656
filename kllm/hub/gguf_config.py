"""A GGUF's metadata as a Hugging Face config. Architectures: llama and qwen3."""

from __future__ import annotations

import math
import struct
from typing import Any

from kllm.hub.gguf import GGUFFile
from kllm.hub.source import ModelSourceError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TIED = "output.weight"


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
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    for key in ("bos", "eos", "pad"):
        if (token := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    return config


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
    theta = _short_float(file.get(f"{arch}.rope.freq_base", float, 10000.0))
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelSourceError(f"{file.path}: RoPE scaling {kind!r} is not supported")
    factor = _short_float(file.get(f"{arch}.rope.scaling.factor", float))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        context = _positive(file, f"{arch}.context_length")
        rope["original_max_position_embeddings"] = _positive(
            file, f"{arch}.rope.scaling.original_context_length", context
        )
    return rope


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
