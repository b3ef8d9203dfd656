"""What a checkpoint is to the code that builds a model: a config and named tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from kllm.kernels.linear import QuantizedRows


class WeightError(ValueError):
    """A checkpoint cannot be used. The message names the file and, where there is one, the tensor."""


class Checkpoint(Protocol):
    """config: as in Hugging Face's config.json (a GGUF's metadata is translated to the same keys).
    config_file: where it comes from, for messages. files: what the tensors are read from.
    Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the file calls them."""

    config: dict[str, Any]
    config_file: str
    files: tuple[Path, ...]

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it. Raises WeightError when it is missing."""
        ...

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantised and converted to dtype, in memory of its own.

        Raises WeightError naming file and tensor when it is missing, truncated or of another shape."""
        ...

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        """The matrix as it is kept, if it is kept quantised in rows that operators can take, else None.

        Raises WeightError as `get` does."""
        ...
