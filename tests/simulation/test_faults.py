"""Fault schedules as values: one seed, one schedule, and a text that brings it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.simulation.faults import KINDS, FaultError, FaultSchedule


@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(1.0, 1e5))
def test_the_text_of_a_schedule_brings_it_back(seed: int, instances: int, horizon_s: float) -> None:
    schedule = FaultSchedule.random(seed, instances, horizon_s)
    assert FaultSchedule.random(seed, instances, horizon_s) == schedule
    assert FaultSchedule.parse(str(schedule), instances) == schedule
    assert all(0 <= fault.at_s <= horizon_s and fault.node < instances for fault in schedule.faults)


def test_every_kind_is_drawn() -> None:
    drawn = {fault.kind for seed in range(50) for fault in FaultSchedule.random(seed, 4, 100.0).faults}
    assert drawn == set(KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crash 2", "is not a fault"),
        ("12 burn 2", "is not a fault"),
        ("1.2.3 crash 2", "number"),
        ("12 crash 4", "there is no instance 4"),
        ("12 hang 1", "lasts some time"),
        ("12 slow 1 for 3 by 0", "factor above 0"),
        ("12 weather for 3 by 1.5", "probability"),
        ("1 crash 0; nonsense", "nonsense"),
    ],
)
def test_a_schedule_that_cannot_be_read_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        FaultSchedule.parse(text, instances=4)


def test_faults_are_carried_out_in_order_of_time_whatever_the_order_of_the_text() -> None:
    schedule = FaultSchedule.parse("30 slow 1 for 20 by 4; 12.5 crash 2", instances=4)
    assert str(schedule) == "12.5 crash 2; 30 slow 1 for 20 by 4"
