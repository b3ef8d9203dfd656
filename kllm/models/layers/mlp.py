"""The gated MLP: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kllm.kernels.linear import LinearWeight
from kllm.kernels.operators import Operators
from kllm.models.layers.tensors import TensorReader


@dataclass(frozen=True, slots=True)
class Mlp:
    operators: Operators
    gate_up: LinearWeight
    down: LinearWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        ops = self.operators
        return ops.linear(ops.swiglu(ops.linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias)


def read_mlp(reader: TensorReader, prefix: str, hidden: int, inner: int, bias: bool = False) -> Mlp:
    """From `{prefix}gate_proj`, `up_proj` and `down_proj`."""
    pair = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    return Mlp(
        reader.operators,
        reader.linear(pair, [inner, inner], hidden, gated=True),
        reader.linear([f"{prefix}down_proj"], [hidden], inner),
        reader.bias(pair, [inner, inner]) if bias else None,
        reader.bias([f"{prefix}down_proj"], [hidden]) if bias else None,
    )
