"""When requests are sent: endless streams of ascending arrival times in seconds, from a rate and a seed.

Burstiness is told by the coefficient of variation (CV) of the gaps between arrivals: their standard deviation over
their mean. A Poisson process has 1; the recorded traces have 1 to 13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """`rate` a second on average, each independent of all others; a rate of infinity sends everything at 0."""
    rng = np.random.default_rng([seed, 0])
    now = 0.0
    while True:
        if not math.isinf(rate):
            now += float(rng.exponential(1.0 / rate))
        yield now


def gamma_arrivals(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Gamma distributed gaps with mean 1 / `rate` and this CV: regular below 1, Poisson at 1, in clusters above."""
    rng = np.random.default_rng([seed, 1])
    shape = 1.0 / cv**2
    now = 0.0
    while True:
        now += float(rng.gamma(shape, 1.0 / (rate * shape)))
        yield now


def bursty_arrivals(on_rate: float, on_s: float, off_s: float, seed: int) -> Iterator[float]:
    """A Poisson process of `on_rate` that is on for `on_s` and off for `off_s` seconds on average, exponentially.

    The mean rate is on_rate · on_s / (on_s + off_s); the squared CV of the gaps of this interrupted Poisson process is
    1 + 2 · on_rate · a / (a + b)² with a = 1 / on_s and b = 1 / off_s (Kuczura, "The interrupted Poisson process as an
    overflow process", Bell System Technical Journal 52, 1973). It starts on or off as it is at any other time.
    """
    rng = np.random.default_rng([seed, 2])
    begin = 0.0
    if rng.random() * (on_s + off_s) >= on_s:
        begin = float(rng.exponential(off_s))
    while True:
        end = begin + float(rng.exponential(on_s))
        now = begin + float(rng.exponential(1.0 / on_rate))
        while now < end:
            yield now
            now += float(rng.exponential(1.0 / on_rate))
        begin = end + float(rng.exponential(off_s))


def diurnal_arrivals(rate: float, period_s: float, amplitude: float, seed: int) -> Iterator[float]:
    """A Poisson process whose rate at time t is rate · (1 + amplitude · sin(2π · t / period_s)).

    amplitude: 0 to 1. By thinning (Lewis and Shedler, 1979): of a process at the highest rate, an arrival stays with
    the probability that the rate of its moment has of the highest.
    """
    rng = np.random.default_rng([seed, 3])
    highest = rate * (1.0 + amplitude)
    now = 0.0
    while True:
        now += float(rng.exponential(1.0 / highest))
        if rng.random() * highest < rate * (1.0 + amplitude * math.sin(2.0 * math.pi * now / period_s)):
            yield now


def scaled(times: Iterable[float], factor: float) -> Iterator[float]:
    """Every time multiplied by `factor`: 2 makes gaps twice as long and halves the rate."""
    return (time * factor for time in times)
