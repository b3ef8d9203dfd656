"""A counter and a histogram for one thread. prometheus_client's take locks and check labels at each call, which costs
microseconds for every token of every stream; these do it when Prometheus asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count(Collector):
    """labels: names and values of the only series."""

    def __init__(self, name: str, text: str, labels: Sequence[tuple[str, str]]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.value = 0.0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[name for name, _ in self._labels])
        family.add_metric([value for _, value in self._labels], self.value)
        yield family


class Distribution(Collector):
    """A histogram. bounds: ascending upper bounds, each included; beyond the last is infinity."""

    def __init__(self, name: str, text: str, labels: Sequence[tuple[str, str]], bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=[name for name, _ in self._labels])
        family.add_metric(
            [value for _, value in self._labels],
            buckets=list(zip(ends, map(float, accumulate(self._counts)), strict=True)),
            sum_value=self._sum,
        )
        yield family
