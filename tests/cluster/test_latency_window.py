from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.cluster.latency_window import MOST, Window, p90, p90_with_ages

steps = st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 100.0)), max_size=60)


@given(steps, st.integers(1, 60))
def test_window_holds_what_a_list_of_everything_would(added: list[tuple[int, float]], seconds: int) -> None:
    window, everything, now = Window(float(seconds)), [], 0.0
    for gap, value in added:
        now += gap
        window.add(now, value)
        everything.append((now, value))
        assert window.values(now) == [value for at, value in everything if at > now - seconds]
    later = now + seconds / 2
    assert window.values(later) == [value for at, value in everything if at > later - seconds]
    assert window.values(now + seconds) == []


def test_window_is_bounded() -> None:
    window = Window(10.0)
    for value in range(MOST + 5):
        window.add(1.0, float(value))
    assert window.values(1.0) == [float(value) for value in range(5, MOST + 5)]


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
def test_p90_is_numpys(values: list[float]) -> None:
    assert math.isclose(p90(values), float(np.percentile(values, 90)), rel_tol=1e-9, abs_tol=1e-9)


def test_p90_of_nothing() -> None:
    assert p90([]) == 0.0
    assert p90_with_ages([], []) == 0.0


@given(st.lists(st.floats(0.0, 100.0), max_size=50), st.lists(st.floats(0.0, 100.0), max_size=50))
def test_ages_only_ever_raise_it(values: list[float], ages: list[float]) -> None:
    assert p90_with_ages(values, ages) >= p90(values)
    assert p90_with_ages(values, ages) >= p90([*values, *ages])
    older = [age + 1.0 for age in ages]
    assert p90_with_ages(values, older) >= p90_with_ages(values, ages)


def test_a_burst_that_has_just_come_does_not_hide_those_before_it() -> None:
    assert p90_with_ages([3.0] * 10, [0.0] * 1000) == pytest.approx(3.0)
