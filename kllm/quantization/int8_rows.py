"""Symmetric int8: a vector is 127 steps either way of its largest magnitude."""

from __future__ import annotations

import torch

LARGEST = 127


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors x [..., n] to int8 [..., n] and scales float32 [...]: x is about value * scale.

    scale = max |x| / 127, value = x / scale rounded to the nearest, halves to even; 0 for a vector of zeros.
    Every element is computed alone, so results do not depend on what else is in x."""
    values = x.float()
    scales = values.abs().amax(dim=-1) / LARGEST
    steps = values / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales
