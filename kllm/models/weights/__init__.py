"""Reading weights: safetensors folders and GGUF files behind one `Checkpoint`, quantised on the way if wanted."""

from kllm.models.weights.checkpoint import open_checkpoint
from kllm.models.weights.interface import Checkpoint, WeightError
from kllm.models.weights.quantized_checkpoint import QuantizedCheckpoint

__all__ = ["Checkpoint", "QuantizedCheckpoint", "WeightError", "open_checkpoint"]
