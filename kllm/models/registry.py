"""Architectures by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable

from kllm.models import deepseek_v3, llama, qwen3
from kllm.models.interface import Model
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig
from kllm.models.weights.interface import Checkpoint, WeightError

Loader = Callable[[ModelConfig, TensorReader], Model]

_BY_ARCHITECTURE: dict[str, Loader] = {
    "LlamaForCausalLM": llama.load,
    "Qwen3ForCausalLM": qwen3.load,
    "DeepseekV3ForCausalLM": deepseek_v3.load,
}
_BY_MODEL_TYPE: dict[str, Loader] = {
    "llama": llama.load,
    "qwen3": qwen3.load,
    "deepseek_v3": deepseek_v3.load,
    "kimi_k2": deepseek_v3.load,
}


def find_loader(checkpoint: Checkpoint) -> Loader:
    """By `architectures`, else by `model_type`. Raises WeightError naming what the checkpoint says it is."""
    config, file = checkpoint.config, checkpoint.config_file
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    for name in architectures:
        if isinstance(name, str) and name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    model_type = config.get("model_type")
    if not architectures and isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    named = ", ".join(map(str, architectures)) or model_type
    if not named:
        raise WeightError(f"{file}: neither architectures nor model_type says what the model is")
    raise WeightError(f"{file}: architecture {named} is not supported (only {', '.join(_BY_ARCHITECTURE)})")
