"""Takes tensors out of a checkpoint into the layout the operators want, reporting progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import Operators
from kllm.models.weights.interface import Checkpoint

Progress = Callable[[str, float], None]


class TensorReader:
    """Every method raises WeightError for a tensor that is missing, broken or of another shape.

    Matrices that read the same input are stacked while they are read, so that no more than one layer's
    worth of memory is held twice."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, operators: Operators, progress: Progress | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self.dtype = dtype
        self.operators = operators

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._checkpoint.get(name, shape, dtype or self.dtype)

    def linear(
        self, names: Sequence[str], outs: Sequence[int], ins: int, dtype: torch.dtype | None = None
    ) -> LinearWeight:
        """Modules names[i] with weights [outs[i], ins], stacked along their outputs."""
        if len(names) == 1:
            return self.operators.pack_linear(self.tensor(f"{names[0]}.weight", outs[0], ins, dtype=dtype))
        stacked = torch.empty(sum(outs), ins, dtype=dtype or self.dtype)
        for part, name, out in zip(stacked.split(list(outs)), names, outs, strict=True):
            part.copy_(self.tensor(f"{name}.weight", out, ins, dtype=dtype))
        return self.operators.pack_linear(stacked)

    def bias(self, names: Sequence[str], outs: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)])

    def report(self, done: float) -> None:
        """done: share of the weights read so far, 0 to 1."""
        if self._progress is not None:
            self._progress("load weights", done)
