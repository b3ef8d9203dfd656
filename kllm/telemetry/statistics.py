"""Percentiles and service level objectives: the figures that every report is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PERCENTILES = (50, 90, 95, 99)
PromptClass = Literal["short", "long"]


PROMPT_CLASSES: tuple[PromptClass, ...] = get_args(PromptClass)


def prompt_class(prompt_tokens: int, chunk_tokens: int) -> PromptClass:
    """Short: at most a chunk, so that one step can compute it. chunk_tokens: 0 if it is not known."""
    return "long" if 0 < chunk_tokens < prompt_tokens else "short"


@dataclass(frozen=True)
class Slo:
    """Service level objectives in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def stated(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """For a request that succeeded. An output of one token has no time per output token to miss."""
        if ttft_s is None:
            return False
        if self.ttft_ms is not None and ttft_s * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks of an ascending sequence (numpy's default)."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95 and p99, in the unit of the values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered)} | {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
