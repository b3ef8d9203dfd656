"""Series of one thread say what prometheus_client's own would."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from kllm.telemetry.series import Count, Distribution

LABELS = [("model_name", "m"), ("engine", "0")]
NAMES, VALUES = ["model_name", "engine"], ["m", "0"]
BOUNDS = (0.001, 0.5, 1.0, 20.0)


def exported(registry: CollectorRegistry) -> str:
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if "_created" not in line)


def alone(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


@pytest.mark.parametrize("seed", range(5))
def test_a_distribution_is_a_histogram(seed: int) -> None:
    rng = random.Random(seed)
    registry = CollectorRegistry()
    theirs = Histogram("kllm:x_seconds", "Text.", NAMES, buckets=BOUNDS, registry=registry).labels(*VALUES)
    ours = Distribution("kllm:x_seconds", "Text.", LABELS, BOUNDS)
    values = [*BOUNDS, 0.0, 21.0, *(rng.randrange(64) / 2 for _ in range(50))]  # sums of these are exact
    for value in values:
        times = rng.randrange(1, 4)
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    assert _rounded(exported(alone(ours))) == _rounded(exported(registry))


def _rounded(text: str) -> list[str]:
    """0.001 added once and three times: the last digit of the sum depends on the order."""
    return [
        f"{name} {float(value):.9f}" if "_sum" in name else f"{name} {value}"
        for name, value in (line.rsplit(" ", 1) for line in text.splitlines())
    ]


def test_a_count_is_a_counter() -> None:
    registry = CollectorRegistry()
    theirs = Counter("kllm:tokens", "Text.", NAMES, registry=registry).labels(*VALUES)
    ours = Count("kllm:tokens", "Text.", LABELS)
    for amount in (3, 0, 5):
        theirs.inc(amount)
        ours.value += amount
    assert exported(alone(ours)) == exported(registry)
