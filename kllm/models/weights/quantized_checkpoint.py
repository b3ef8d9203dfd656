"""A checkpoint whose linear maps are quantised on the way, once: the result is kept for the next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from kllm.kernels.linear import QuantizedRows
from kllm.models.weights.interface import Checkpoint, WeightError
from kllm.models.weights.quantized_file import MatrixKind, QuantizedFile, QuantizedReader
from kllm.quantization.matrices import FORMATS, dequantize, fits, quantize

Progress = Callable[[str, float], None]

_KEPT_FLOAT = (".mlp.gate.weight", ".kv_b_proj.weight")  # a router's choice flips easily; kv_b is cut up by MLA
_HEAD = ("embed_tokens.weight", "lm_head.weight")
_log = logging.getLogger(__name__)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a linear map, an embedding or a head that may be quantised."""
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_KEPT_FLOAT)


def format_of(name: str, cols: int, wanted: str) -> str:
    """What a linear map becomes when `wanted` is asked for.

    With int8 the head, and the embedding that may be the same matrix, get a scale for every 32 columns. Nothing after
    the head evens out its errors: in SmolLM2 it causes a fifth of those of all int8 weights and activations together,
    and the finer scales are 6 % more bytes of this one matrix."""
    return "q8_0" if wanted == "int8" and name.endswith(_HEAD) and fits("q8_0", cols) else wanted


class QuantizedCheckpoint:
    """`checkpoint` with its linear maps in `format`, one of FORMATS; see also format_of. Norms, biases, routers and
    matrices whose rows are no whole number of blocks stay as they are; a matrix that is shipped in the very format is
    passed on.

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
        self._matrices: dict[str, MatrixKind] = {}
        for name in checkpoint.names():
            shape = checkpoint.shape(name)
            if is_linear(name, shape) and fits(format, shape[1]):
                self._matrices[name] = MatrixKind(format_of(name, shape[1], format), shape[0], shape[1])
        self._kept = None if cache_folder is None else self._from_cache(cache_folder, progress)

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of a quantised matrix the values it stands for, so that any operators compute with the same numbers."""
        if not self._holds(name, shape):
            return self._checkpoint.get(name, shape, dtype)
        return dequantize(self._matrix(name), dtype)

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        return self._matrix(name) if self._holds(name, shape) else None

    def _holds(self, name: str, shape: tuple[int, ...]) -> bool:
        kind = self._matrices.get(name)
        return kind is not None and kind.shape == tuple(shape)

    def _matrix(self, name: str) -> QuantizedRows:
        kept = self._kept.read(name) if self._kept is not None else None
        return kept or self._shipped(name) or self._quantize(name)

    def _shipped(self, name: str) -> QuantizedRows | None:
        kind = self._matrices[name]
        matrix = self._checkpoint.get_quantized(name, kind.shape)
        return matrix if matrix is not None and matrix.format == kind.format else None

    def _quantize(self, name: str) -> QuantizedRows:
        kind = self._matrices[name]
        try:
            return quantize(self._checkpoint.get(name, kind.shape, torch.float32), kind.format)
        except WeightError:
            raise
        except ValueError as error:
            raise WeightError(
                f"{self.config_file}: tensor {name} cannot be quantised to {kind.format}: {error}"
            ) from error

    def _quantize_all(self, progress: Progress | None) -> Iterator[tuple[str, QuantizedRows]]:
        """Every matrix that is not shipped in the format."""
        total = sum(kind.rows * kind.cols for kind in self._matrices.values())
        done = 0
        for name, kind in self._matrices.items():
            if progress is not None:
                progress("quantise weights", done / total)
            if self._shipped(name) is None:
                yield name, self._quantize(name)
            done += kind.rows * kind.cols
        if progress is not None:
            progress("quantise weights", 1.0)

    def _from_cache(self, folder: Path, progress: Progress | None) -> QuantizedReader | None:
        """The kept matrices, made now if need be; None where they cannot be kept."""
        try:
            file = QuantizedFile(folder, self.files, self._format, self._matrices)
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
