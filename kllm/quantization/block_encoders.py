"""From floats to GGUF blocks of 32 elements, the same bytes as ggml's reference quantisers give.

Layouts are those of block_decoders. With every d and m computed in float32 and kept as fp16:

    Q8_0   d = max |x| / 127                q = x / d, halves away from 0
    Q4_0   d = extreme / -8                 q = x / d + 8, halves up       extreme: the first of largest magnitude
    Q4_1   d = (max - min) / 15, m = min    q = (x - m) / d, halves up
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def encode(values: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """Blocks of finite floats [n, 32] into out uint8 [n, bytes of a block]. kind: a key of BLOCK_BYTES.

    Raises ValueError for a block whose d or m does not fit into fp16."""
    scales = _ENCODERS[kind](values.float(), out)
    if not bool(scales.isfinite().all()):
        raise ValueError(f"values that are not finite, or too large for {kind}")


def _q8_0(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    d = x.abs().amax(dim=1, keepdim=True) / 127
    steps = x * _inverse(d)
    size = steps.abs()
    whole = size.floor()
    whole += size.sub_(whole).mul_(2).floor_()  # 1 where the fraction is a half or more
    out[:, 2:] = whole.copysign_(steps).to(torch.int8).view(torch.uint8)
    return _put_halves(out, d)


def _q4_0(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    extreme = x.gather(1, x.abs().argmax(dim=1, keepdim=True))
    d = extreme / -8
    _put_nibbles(out[:, 2:], (x * _inverse(d)).add_(8.5))
    return _put_halves(out, d)


def _q4_1(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    d = (high - low) / 15
    _put_nibbles(out[:, 4:], ((x - low) * _inverse(d)).add_(0.5))
    return _put_halves(out, d, low)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    """1 / d, and 0 where that is no number: such a d is 0 as fp16, and so is the whole block."""
    inverse = d.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _put_nibbles(out: torch.Tensor, steps: torch.Tensor) -> None:
    """steps [n, 32] of 0 or more, cut to whole numbers of at most 15; low nibbles are elements 0 to 15."""
    numbers = steps.clamp_(max=15).to(torch.uint8)
    torch.bitwise_or(numbers[:, :16], numbers[:, 16:] << 4, out=out)


def _put_halves(out: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """Columns [n, 1] as fp16 at the start of every block. Returns them [n, columns]."""
    halves = torch.cat(columns, dim=1).to(torch.float16)
    out[:, : 2 * len(columns)] = halves.view(torch.uint8)
    return halves


_ENCODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
}
