"""When requests are sent: a Poisson process, or all at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kllm.benchmark.dataset import Sample


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds, `rate` a second on average; a rate of infinity sends everything at 0."""
    rng = np.random.default_rng([seed, 0])
    now = 0.0
    while True:
        if not math.isinf(rate):
            now += float(rng.exponential(1.0 / rate))
        yield now


def with_arrivals(samples: Sequence[Sample], arrivals: Iterator[float]) -> list[Sample]:
    """The same samples at these times. Samples that follow another keep their pause."""
    return [sample if sample.after is not None else replace(sample, arrival_s=next(arrivals)) for sample in samples]
