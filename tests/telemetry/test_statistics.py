"""Percentiles and limits against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.telemetry.statistics import Slo, distribution, percentile

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 95, 99, 100]))
def test_percentile_is_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(st.lists(finite, min_size=1, max_size=50))
def test_a_distribution_has_the_mean_and_percentiles(values):
    figures = distribution(values)
    assert figures["mean"] == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert figures["p95"] == percentile(sorted(values), 95)
    assert list(figures) == ["mean", "p50", "p90", "p95", "p99"]


def test_of_nothing_there_is_no_figure():
    assert distribution([]) is None
    with pytest.raises(ValueError, match="a percentile of nothing"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("slo", "ttft_s", "tpot_s", "met"),
    [
        (Slo(), 100.0, 100.0, True),
        (Slo(ttft_ms=500), 0.5, 9.0, True),
        (Slo(ttft_ms=500), 0.501, None, False),
        (Slo(tpot_ms=50), 9.0, 0.051, False),
        (Slo(tpot_ms=50), 9.0, None, True),
        (Slo(), None, None, False),
    ],
)
def test_a_request_meets_all_limits_or_none(slo, ttft_s, tpot_s, met):
    assert slo.met_by(ttft_s, tpot_s) is met
