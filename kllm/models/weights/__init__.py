"""Reading weights: safetensors folders and GGUF files behind one `Checkpoint`."""

from kllm.models.weights.checkpoint import open_checkpoint
from kllm.models.weights.interface import Checkpoint, WeightError

__all__ = ["Checkpoint", "WeightError", "open_checkpoint"]
