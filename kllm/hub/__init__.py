"""Finding model files: aliases, local folders, GGUF files, and downloads with a cache. Never imports torch."""

from kllm.hub.resolver import pull, resolve
from kllm.hub.source import ModelSource, ModelSourceError

__all__ = ["ModelSource", "ModelSourceError", "pull", "resolve"]
