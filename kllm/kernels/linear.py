"""Weights of linear maps, laid out for the machine once at load time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Quantised weights [rows, cols] as bytes, in a format that operators may take as it is.

    q8_0, q4_0, q4_1, q4_k, q6_k and the other GGUF types: data uint8 [rows, bytes of the blocks of a row].
    int8: data int8 [rows, cols], scales float32 [rows], a weight is data * scale.
    """

    format: str
    rows: int
    cols: int
    data: torch.Tensor
    scales: torch.Tensor | None = None


WeightSource = torch.Tensor | QuantizedRows


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix [out_features, in_features]. `data` is the implementation's own. Of the operators in torch it is a
    tensor; when `packed`, in oneDNN's blocked layout: opaque, and about twice as fast as a plain matrix for few rows
    (measured: Zen 4, bfloat16 and float32, 1 to 32 rows)."""

    data: Any
    out_features: int
    in_features: int
    packed: bool


def pack(parts: Sequence[WeightSource]) -> LinearWeight:
    """Parts [out_i, in] of one float type, stacked along their outputs; copied if packing is possible."""
    floats = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(floats) < len(parts):
        raise TypeError("operators in torch take float weights")
    weight = floats[0] if len(floats) == 1 else torch.cat(floats)
    out_features, in_features = weight.shape
    if _can_pack(weight):
        data = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return LinearWeight(data, out_features, in_features, packed=True)
    return LinearWeight(weight.contiguous(), out_features, in_features, packed=False)


def apply(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] to [T, out]."""
    if weight.packed:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
        return result
    return F.linear(x, weight.data, bias)


def _can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in _packable_dtypes()


def _packable_dtypes() -> frozenset[torch.dtype]:
    if not _PACKABLE:
        _PACKABLE.append(frozenset(d for d in (torch.float32, torch.bfloat16) if _packing_works(d)))
    return _PACKABLE[0]


def _packing_works(dtype: torch.dtype) -> bool:
    """The operators are torch's own (its compiler uses them) but not public, and not there on every machine:
    try them on a small matrix instead of asking for versions and processors."""
    weight = torch.arange(64 * 32).reshape(64, 32).to(dtype) / 1024
    x = torch.eye(4, 32).to(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            result = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool(torch.equal(result, F.linear(x, weight)))


_PACKABLE: list[frozenset[torch.dtype]] = []
