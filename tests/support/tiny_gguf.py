"""Tiny GGUF files, written by the gguf package from the tiny llama's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from support.tiny_models import CHAT_TEMPLATE, LLAMA_CONFIG, MERGES, SPECIAL_TOKENS, llama_weights, tiny_tokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """A tiny llama's tensor name, as llama.cpp calls it."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order llama.cpp gives to query and key weights: of each head 0, d/2, 1, d/2 + 1, …"""
    per_head = weight.view(heads, -1, weight.shape[-1])
    half = per_head.shape[1] // 2
    return torch.stack([per_head[:, :half], per_head[:, half:]], dim=2).reshape(weight.shape)


def tiny_gguf_tensors(quant: str = "F32", seed: int = 0) -> dict[str, tuple[np.ndarray, str]]:
    """GGUF name to (packed rows, tensor type) of the tiny llama; norms and vectors stay F32."""
    tensors = {}
    for name, weight in llama_weights(LLAMA_CONFIG, seed).items():
        if "q_proj" in name or "k_proj" in name:
            heads = LLAMA_CONFIG["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = interleave_heads(weight, heads)
        kind = quant if weight.dim() == 2 else "F32"
        packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        tensors[gguf_name(name)] = (packed, kind)
    return tensors


def write_tiny_gguf(
    path: Path,
    quant: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, str] | None] | None = None,
    arch: str = "llama",
    pre: str = "smollm",
) -> Path:
    """The tiny llama as one GGUF file. metadata and tensors replace entries; a tensor of None is left out."""
    writer = gguf.GGUFWriter(path, arch)
    values = {**_metadata(arch, pre), **(metadata or {})}
    for key, value in values.items():
        _add(writer, key, value)
    for name, entry in {**tiny_gguf_tensors(quant), **(tensors or {})}.items():
        if entry is not None:
            writer.add_tensor(name, entry[0], raw_dtype=gguf.GGMLQuantizationType[entry[1]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(arch: str, pre: str) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    return {
        f"{arch}.block_count": LLAMA_CONFIG["num_hidden_layers"],
        f"{arch}.context_length": LLAMA_CONFIG["max_position_embeddings"],
        f"{arch}.embedding_length": LLAMA_CONFIG["hidden_size"],
        f"{arch}.feed_forward_length": LLAMA_CONFIG["intermediate_size"],
        f"{arch}.attention.head_count": LLAMA_CONFIG["num_attention_heads"],
        f"{arch}.attention.head_count_kv": LLAMA_CONFIG["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": LLAMA_CONFIG["rms_norm_eps"],
        f"{arch}.rope.freq_base": LLAMA_CONFIG["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
