"""Metrics of SLO Load: how much of what the service level objectives allow is used; 1 is all. docs/slo-load.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric

from kllm.telemetry.families import LABELS, PREFIX, Families

Pool = Literal["prefill", "decode"]


class Side(Protocol):
    """The part of kllm.cluster.slo_snapshot.Side that is exported."""

    @property
    def load(self) -> float: ...

    @property
    def predicted(self) -> float: ...

    @property
    def measured(self) -> float: ...


class PoolLoad(Protocol):
    @property
    def side(self) -> Side: ...


class InstanceLoad(Protocol):
    """prefill, decode: None where the instance's role has no such side."""

    @property
    def index(self) -> int: ...

    @property
    def prefill(self) -> Side | None: ...

    @property
    def decode(self) -> Side | None: ...

    @property
    def kv_guard(self) -> float: ...


class Snapshot(Protocol):
    """The part of kllm.cluster.slo_snapshot.SloSnapshot that is exported."""

    @property
    def pools(self) -> Mapping[Pool, PoolLoad]: ...

    @property
    def instances(self) -> Sequence[InstanceLoad]: ...


_FIGURES: tuple[tuple[str, str, Callable[[Side], float]], ...] = (
    ("slo_load", "The larger of predicted and measured latency over its SLO.", lambda side: side.load),
    ("slo_load_predicted", "Predicted latency of the next request over its SLO.", lambda side: side.predicted),
    ("slo_load_measured", "Measured p90 of latency over its SLO.", lambda side: side.measured),
)


def slo_metrics(families: Families, snapshot: Snapshot) -> Iterator[Metric]:
    """Pools have the label `pool`; instances also `engine`, and names of their own, so that a sum over a name counts
    nothing twice."""
    model_name = families.labels[0]
    for name, text, figure in _FIGURES:
        family = GaugeMetricFamily(PREFIX + name, f"{text} Of a pool.", labels=(LABELS[0], "pool"))
        for pool, load in snapshot.pools.items():
            family.add_metric((model_name, pool), figure(load.side))
        yield family
        family = GaugeMetricFamily(f"{PREFIX}instance_{name}", f"{text} Of an instance.", labels=(*LABELS, "pool"))
        for instance in snapshot.instances:
            for pool, side in (("prefill", instance.prefill), ("decode", instance.decode)):
                if side is not None:
                    family.add_metric((model_name, str(instance.index), pool), figure(side))
        yield family
    guard = GaugeMetricFamily(
        PREFIX + "slo_kv_guard", "KV held and coming over the high-water mark of an instance.", labels=LABELS
    )
    for instance in snapshot.instances:
        guard.add_metric((model_name, str(instance.index)), instance.kv_guard)
    yield guard
