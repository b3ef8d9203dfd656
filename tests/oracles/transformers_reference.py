"""What transformers says. Runs in the oracle's own virtual environment and never imports kllm.

transformers_reference.py tiny NAME,NAME,… FOLDER
    random tiny models saved to FOLDER/NAME/, each with a logits.bin in the safetensors format:
    tokens int64 [N], logits float32 [N, vocab]
transformers_reference.py generate INPUT.json OUTPUT.json
    greedy tokens. Input {"model": folder or .gguf file, "max_tokens": n, "dtype": "float32", "prompts": [[ids], …]},
    output {"sequences": [{"tokens": [ids], "gaps": [top-1 minus top-2 logit, per token]}, …]}; end of text is ignored.
transformers_reference.py logits INPUT.json OUTPUT.safetensors
    the same input without max_tokens; output "0", "1", …: float32 [prompt length, vocab]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

SEED = 0
TOKENS = 70
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def tiny_config(architecture: str) -> Any:
    """The tiny configurations by name; the part before "-" is the architecture."""
    match architecture:
        case "llama":
            return LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=True)
        case "llama-llama3-biases":
            return LlamaConfig(
                **COMMON, num_key_value_heads=2, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True
            )
        case "llama-linear":
            linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
            return LlamaConfig(**COMMON, num_key_value_heads=4, head_dim=24, rope_parameters=linear)
        case "qwen3":
            return Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32)
        case "qwen3-yarn":
            return Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32, rope_parameters=YARN, attention_bias=True)
        case "deepseek_v3":
            return DeepseekV3Config(**COMMON, **DEEPSEEK)
        case "deepseek_v3-plain":
            plain = {
                "q_lora_rank": None,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": None,
                "attention_bias": True,
            }
            return DeepseekV3Config(**COMMON, **{**DEEPSEEK, **plain})
    raise SystemExit(f"no tiny configuration {architecture!r}")


def write_tiny(architecture: str, folder: Path) -> None:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            elif "norm" in name:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
    tokens = torch.randint(0, COMMON["vocab_size"], (TOKENS,))
    model.save_pretrained(folder)
    logits = _logits(model, tokens.tolist())
    save_file({"tokens": tokens, "logits": logits}, folder / "logits.bin")


def write_generated(job: dict[str, Any], output: Path) -> None:
    """Prompts of one length together, so that no padding takes part."""
    model = load(job["model"], job.get("dtype", "float32"))
    sequences: list[dict[str, Any]] = [{} for _ in job["prompts"]]
    for length in sorted({len(prompt) for prompt in job["prompts"]}):
        places = [i for i, prompt in enumerate(job["prompts"]) if len(prompt) == length]
        generated = _generate(model, [job["prompts"][i] for i in places], job["max_tokens"])
        for place, sequence in zip(places, generated, strict=True):
            sequences[place] = sequence
    output.write_text(json.dumps({"sequences": sequences}), encoding="utf-8")


def write_logits(job: dict[str, Any], output: Path) -> None:
    model = load(job["model"], job.get("dtype", "float32"))
    save_file({str(i): _logits(model, prompt) for i, prompt in enumerate(job["prompts"])}, output)


def load(path: str, dtype: str) -> Any:
    """A Hugging Face folder, or a GGUF file dequantised to dtype."""
    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    source = Path(path)
    if source.suffix == ".gguf":
        from transformers import GgufConfig

        kwargs |= {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
        source = source.parent
    return AutoModelForCausalLM.from_pretrained(source, **kwargs).eval()


@torch.no_grad()
def _logits(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0].float().contiguous()


@torch.no_grad()
def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """prompts: of one length."""
    tokens: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    inputs, cache = torch.tensor(prompts), None
    for _ in range(max_tokens):
        result = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        best = result.logits[:, -1].float().topk(2)
        inputs = best.indices[:, :1]
        for i in range(len(prompts)):
            tokens[i].append(int(inputs[i, 0]))
            gaps[i].append(float(best.values[i, 0] - best.values[i, 1]))
    return [{"tokens": t, "gaps": g} for t, g in zip(tokens, gaps, strict=True)]


def main(command: str, first: str, second: str) -> None:
    match command:
        case "tiny":
            for name in first.split(","):
                write_tiny(name, Path(second) / name)
        case "generate":
            write_generated(json.loads(Path(first).read_text(encoding="utf-8")), Path(second))
        case "logits":
            write_logits(json.loads(Path(first).read_text(encoding="utf-8")), Path(second))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
