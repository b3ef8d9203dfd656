"""Makes the metric families of one server: names under our prefix, labels as operators know them from vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "kllm:"
LABELS = ("model_name", "engine")


class Families:
    """Gauges have a sample for each instance, whose index is the label `engine`; counters are of the whole server, with
    the label 0."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.labels = (model_name, "0")

    def gauge(self, name: str, text: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        for index, value in enumerate(values):
            family.add_metric((self._model_name, str(index)), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """One for each value of a further label."""
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, label))
        for which, value in values.items():
            family.add_metric((*self.labels, which), value)
        return family
