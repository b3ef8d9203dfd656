"""One entry to weights, whatever the files are."""

from __future__ import annotations

from kllm.hub.gguf import GGUFFile
from kllm.hub.model_config import read_config
from kllm.hub.source import ModelSource, ModelSourceError
from kllm.models.weights.gguf_file import GGUFCheckpoint
from kllm.models.weights.interface import Checkpoint, WeightError
from kllm.models.weights.safetensors_folder import SafetensorsFolder


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the config and the tensors' whereabouts; tensors themselves are read by `get`.

    Raises WeightError naming the file, and the tensor where there is one."""
    try:
        if source.kind == "gguf":
            return GGUFCheckpoint(GGUFFile(source.path))
        return SafetensorsFolder(source.path, read_config(source))
    except ModelSourceError as error:
        raise WeightError(str(error)) from error
