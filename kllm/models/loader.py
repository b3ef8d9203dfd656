"""From a checkpoint to a model that runs."""

from __future__ import annotations

import torch

from kllm.kernels.operators import Operators
from kllm.models.interface import Model
from kllm.models.layers.tensors import Progress, TensorReader
from kllm.models.model_config import ModelConfig
from kllm.models.registry import find_loader
from kllm.models.weights.interface import Checkpoint


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    operators: Operators,
    progress: Progress | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    keep_quantized: bool = False,
    max_model_len: int | None = None,
) -> Model:
    """The model with weights and activations of `dtype`, computing with `operators`. kv_dtype, keep_quantized
    and max_model_len as TensorReader has them.

    progress: called with a phase and the share of the weights read so far, 0 to 1.
    Raises WeightError for an architecture, a config value or a tensor that cannot be used."""
    load = find_loader(checkpoint)
    with torch.no_grad():
        reader = TensorReader(checkpoint, dtype, operators, progress, kv_dtype, keep_quantized, max_model_len)
        return load(ModelConfig(checkpoint.config, checkpoint.config_file), reader)
