"""Tiny random checkpoints in Hugging Face's format, written without kllm and without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "i n", "e r", "th e", "a n", "o n", "Ġ t", "Ġ a", "Ġ the", "Ġ w", "r e", "an d")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,  # more than the tokenizer has, as in padded checkpoints
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_tiny_llama(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """A random llama with weights of N(0, 0.08), a byte-level tokenizer of 271 tokens and a ChatML template.

    Writes config.json, generation_config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json into `path`, which is made if it is missing. overrides: fields of config.json.
    The end of text is <|im_end|>. Returns path.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    eos = tokenizer.token_to_id("<|im_end|>")
    bos = tokenizer.token_to_id("<|im_start|>")
    config = {**LLAMA_CONFIG, "bos_token_id": bos, "eos_token_id": eos, **overrides}
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    save_file(llama_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return path


def llama_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights for a llama config, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.08

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.1

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": normal(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": normal(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": normal(inter, hidden),
            prefix + "mlp.up_proj.weight": normal(inter, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, inter),
        }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return weights


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a dozen merges, three special tokens. Encodes and decodes any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    pieces = alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
