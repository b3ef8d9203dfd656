"""A checkpoint whose linear maps are quantised on the way, once: the result is kept for the next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from kllm.kernels.linear import QuantizedRows
from kllm.models.weights.interface import Checkpoint, WeightError
from kllm.models.weights.quantized_file import QuantizedFile, QuantizedReader
from kllm.quantization.matrices import FORMATS, dequantize, fits, quantize

Progress = Callable[[str, float], None]

_KEPT_FLOAT = (".mlp.gate.weight", ".kv_b_proj.weight")  # a router's choice flips easily; kv_b is cut up by MLA
_log = logging.getLogger(__name__)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a linear map, an embedding or a head that may be quantised."""
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_KEPT_FLOAT)


class QuantizedCheckpoint:
    """`checkpoint` with its linear maps in `format`, one of FORMATS. Norms, biases, routers and matrices whose rows
    are no whole number of blocks stay as they are; a matrix that is shipped in the very format is passed on.

    cache_folder: where the result is kept; all matrices are then quantised now, unless they are there already, with
    progress("quantise weights", share). None, or a folder that cannot be written (which is logged): each is quantised
    when it is asked for.
    Raises ValueError for an unknown format, WeightError for weights that cannot be quantised."""

    config: dict[str, Any]

    def __init__(
        self, checkpoint: Checkpoint, format: str, cache_folder: Path | None, progress: Progress | None = None
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
        self.config = checkpoint.config
        self.config_file = checkpoint.config_file
        self.files = checkpoint.files
        self._checkpoint = checkpoint
        self._format = format
        self._shapes: dict[str, tuple[int, int]] = {}
        for name in checkpoint.names():
            shape = checkpoint.shape(name)
            if is_linear(name, shape) and fits(format, shape[1]):
                self._shapes[name] = (shape[0], shape[1])
        self._kept = None if cache_folder is None else self._from_cache(cache_folder, progress)

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of a quantised matrix the values it stands for, so that any operators compute with the same numbers."""
        if self._shapes.get(name) != tuple(shape):
            return self._checkpoint.get(name, shape, dtype)
        return dequantize(self._matrix(name), dtype)

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        return self._matrix(name) if self._shapes.get(name) == tuple(shape) else None

    def _matrix(self, name: str) -> QuantizedRows:
        kept = self._kept.read(name) if self._kept is not None else None
        return kept or self._shipped(name) or self._quantize(name)

    def _shipped(self, name: str) -> QuantizedRows | None:
        matrix = self._checkpoint.get_quantized(name, self._shapes[name])
        return matrix if matrix is not None and matrix.format == self._format else None

    def _quantize(self, name: str) -> QuantizedRows:
        try:
            return quantize(self._checkpoint.get(name, self._shapes[name], torch.float32), self._format)
        except WeightError:
            raise
        except ValueError as error:
            raise WeightError(
                f"{self.config_file}: tensor {name} cannot be quantised to {self._format}: {error}"
            ) from error

    def _quantize_all(self, progress: Progress | None) -> Iterator[tuple[str, QuantizedRows]]:
        """Every matrix that is not shipped in the format."""
        total = sum(rows * cols for rows, cols in self._shapes.values())
        done = 0
        for name, (rows, cols) in self._shapes.items():
            if progress is not None:
                progress("quantise weights", done / total)
            if self._shipped(name) is None:
                yield name, self._quantize(name)
            done += rows * cols
        if progress is not None:
            progress("quantise weights", 1.0)

    def _from_cache(self, folder: Path, progress: Progress | None) -> QuantizedReader | None:
        """The kept matrices, made now if need be; None where they cannot be kept."""
        try:
            file = QuantizedFile(folder, self.files, self._format, self._shapes)
            kept = file.open()
            if kept is not None:
                return kept
            with file.locked():
                kept = file.open()  # another process may have been faster
                if kept is None:
                    file.write(self._quantize_all(progress))
                    kept = file.open()
            return kept
        except OSError as error:
            _log.warning("quantised weights cannot be kept for the next start: %s", error)
            return None
