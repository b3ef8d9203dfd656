"""Arrival processes have the rate and the burstiness that they say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from kllm.workload.arrivals import bursty_arrivals, diurnal_arrivals, gamma_arrivals, poisson_arrivals, scaled


def gaps_of(arrivals: Iterator[float], count: int) -> list[float]:
    times = list(islice(arrivals, count))
    assert all(earlier <= later for earlier, later in pairwise(times))
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def cv(gaps: list[float]) -> float:
    return pstdev(gaps) / fmean(gaps)


def test_poisson_gaps_are_exponential():
    gaps = gaps_of(poisson_arrivals(50.0, seed=1), 20_000)
    mean = fmean(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert cv(gaps) == pytest.approx(1.0, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_an_infinite_rate_sends_all_at_once():
    assert list(islice(poisson_arrivals(math.inf, seed=1), 5)) == [0.0] * 5


@pytest.mark.parametrize("wanted", [0.3, 1.0, 2.0, 4.0])
def test_gamma_gaps_have_the_cv_asked_for(wanted):
    gaps = gaps_of(gamma_arrivals(5.0, wanted, seed=2), 50_000)
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert cv(gaps) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(("on_rate", "on_s", "off_s"), [(20.0, 2.0, 6.0), (5.0, 10.0, 1.0)])
def test_bursts_have_the_mean_rate_and_cv_of_an_interrupted_poisson_process(on_rate, on_s, off_s):
    gaps = gaps_of(bursty_arrivals(on_rate, on_s, off_s, seed=3), 100_000)
    on_end, off_end = 1 / on_s, 1 / off_s
    assert 1 / fmean(gaps) == pytest.approx(on_rate * on_s / (on_s + off_s), rel=0.05)
    assert cv(gaps) == pytest.approx(math.sqrt(1 + 2 * on_rate * on_end / (on_end + off_end) ** 2), rel=0.05)


def test_bursts_start_on_or_off_as_often_as_at_any_other_time():
    quiet = sum(next(bursty_arrivals(1000.0, 2.0, 6.0, seed)) > 0.05 for seed in range(400))
    assert quiet / 400 == pytest.approx(0.75, abs=0.06)


def test_the_diurnal_rate_follows_its_sine():
    period, amplitude, rate = 100.0, 0.8, 20.0
    arrivals = diurnal_arrivals(rate, period, amplitude, seed=4)
    times = []
    while not times or times[-1] < 20 * period:
        times.append(next(arrivals))
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.02)
    for eighth in range(8):
        begin, end = eighth * period / 8, (eighth + 1) * period / 8
        seen = sum(begin <= time % period < end for time in times) / 20
        turns = 2 * math.pi / period
        expected = rate * (end - begin + amplitude / turns * (math.cos(turns * begin) - math.cos(turns * end)))
        assert seen == pytest.approx(expected, rel=0.06)


def test_scaled_times_keep_their_pattern():
    times = list(islice(gamma_arrivals(5.0, 3.0, seed=2), 1000))
    assert list(scaled(times, 0.5)) == [time / 2 for time in times]
    assert cv(gaps_of(scaled(times, 4.0), 1000)) == pytest.approx(cv(gaps_of(iter(times), 1000)))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: poisson_arrivals(3.0, seed),
        lambda seed: gamma_arrivals(3.0, 2.0, seed),
        lambda seed: bursty_arrivals(3.0, 1.0, 1.0, seed),
        lambda seed: diurnal_arrivals(3.0, 60.0, 0.5, seed),
    ],
)
def test_the_seed_decides(make):
    assert list(islice(make(1), 50)) == list(islice(make(1), 50))
    assert list(islice(make(1), 50)) != list(islice(make(2), 50))
