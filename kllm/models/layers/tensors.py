"""Takes tensors out of a checkpoint into the layout the operators want, reporting progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kllm.kernels.linear import LinearWeight, QuantizedRows, WeightSource
from kllm.kernels.operators import Operators
from kllm.models.weights.interface import Checkpoint

Progress = Callable[[str, float], None]


class TensorReader:
    """Every method raises WeightError for a tensor that is missing, broken or of another shape.

    Matrices that read the same input are stacked while they are read, so that no more than one layer's
    worth of memory is held twice.

    kv_dtype: type of the KV cache, by default dtype. keep_quantized: matrices that the checkpoint keeps in a format
    the operators take are handed over as they are. max_model_len: the model is run for no more positions, by default
    for all that it has."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        operators: Operators,
        progress: Progress | None = None,
        kv_dtype: torch.dtype | None = None,
        keep_quantized: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._keep_quantized = keep_quantized
        self._max_model_len = max_model_len
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.operators = operators

    def positions(self, length: int) -> int:
        """How many positions a model of this length needs tables for."""
        return length if self._max_model_len is None else min(length, self._max_model_len)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._checkpoint.get(name, shape, dtype or self.dtype)

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        ins: int,
        dtype: torch.dtype | None = None,
        gated: bool = False,
    ) -> LinearWeight:
        """Modules names[i] with weights [outs[i], ins], stacked along their outputs. gated: see pack_linear.
        With a dtype of its own a matrix is never quantised."""
        parts = self._quantized(names, outs, ins) if dtype is None else None
        if parts is None:
            pairs = zip(names, outs, strict=True)
            parts = [self.tensor(f"{name}.weight", out, ins, dtype=dtype) for name, out in pairs]
        return self.operators.pack_linear(*parts, gated=gated)

    def rows(self, name: str, count: int, size: int) -> WeightSource:
        """The matrix `name` [count, size] as pack_linear and pack_embedding take it."""
        parts = self._quantized([name], [count], size)
        return parts[0] if parts is not None else self.tensor(f"{name}.weight", count, size)

    def _quantized(self, names: Sequence[str], outs: Sequence[int], ins: int) -> list[WeightSource] | None:
        """Every part as it is kept, if all are kept in one format that the operators take."""
        if not self._keep_quantized or not self.operators.quantized_formats:
            return None
        parts: list[QuantizedRows] = []
        for name, out in zip(names, outs, strict=True):
            part = self._checkpoint.get_quantized(f"{name}.weight", (out, ins))
            if part is None or part.format not in self.operators.quantized_formats:
                return None
            parts.append(part)
        return list(parts) if len({part.format for part in parts}) == 1 else None

    def bias(self, names: Sequence[str], outs: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)])

    def report(self, done: float) -> None:
        """done: share of the weights read so far, 0 to 1."""
        if self._progress is not None:
            self._progress("load weights", done)
