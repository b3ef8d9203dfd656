"""What SLO Load comes to at one moment: of every instance, and of the pools. See slo_load.py."""

from __future__ import annotations

from typing import Literal

import msgspec

from kllm.cluster.slo_prediction import Demand, InstanceReport
from kllm.messages import Role

Pool = Literal["prefill", "decode"]


class SloLimits(msgspec.Struct, frozen=True):
    """Seconds to the first token and per token after it, that nine in ten requests should stay within."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side, of an instance or of a pool. predicted_s: None while step times are not known. measured_s: 0 where
    nothing was measured. samples: requests that it was measured at, open ones included."""

    slo_s: float
    predicted_s: float | None = None
    measured_s: float
    samples: int

    @property
    def predicted(self) -> float:
        return (self.predicted_s or 0.0) / self.slo_s

    @property
    def measured(self) -> float:
        return self.measured_s / self.slo_s

    @property
    def load(self) -> float:
        return max(self.predicted, self.measured)

    @property
    def larger(self) -> Literal["predicted", "measured"]:
        """Which of them the load is."""
        return "predicted" if self.predicted >= self.measured else "measured"


class InstanceSlo(msgspec.Struct, frozen=True, kw_only=True):
    """prefill, decode: its sides; None where its role has none. kv_guard: KV held and coming over the high-water mark;
    not part of the load. report, demand: what was predicted from."""

    index: int
    role: Role
    prefill: Side | None
    decode: Side | None
    kv_guard: float
    report: InstanceReport
    demand: Demand


class PoolSlo(msgspec.Struct, frozen=True, kw_only=True):
    """instances: how many it has. chosen: the instance whose prediction is the least; None if nothing is predicted."""

    side: Side
    instances: int
    chosen: int | None


class SloSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """waiting: requests without a token. decoding: those with one. typical_uncached, typical_prompt: tokens."""

    limits: SloLimits
    window_s: float
    waiting: int
    decoding: int
    typical_uncached: float
    typical_prompt: float
    pools: dict[Pool, PoolSlo]
    instances: list[InstanceSlo]
