"""Fault schedules as values: one seed, one schedule, and a text that brings it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.simulation.faults import KINDS, STORE_KINDS, FaultError, FaultSchedule


@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(1.0, 1e5), st.booleans())
def test_the_text_of_a_schedule_brings_it_back(seed: int, instances: int, horizon_s: float, store: bool) -> None:
    schedule = FaultSchedule.random(seed, instances, horizon_s, store=store)
    assert FaultSchedule.random(seed, instances, horizon_s, store=store) == schedule
    assert FaultSchedule.parse(str(schedule), instances) == schedule
    assert all(0 <= fault.at_s <= horizon_s and fault.node < instances for fault in schedule.faults)


def test_every_kind_is_drawn() -> None:
    drawn = {fault.kind for seed in range(50) for fault in FaultSchedule.random(seed, 4, 100.0, store=True).faults}
    assert drawn == set(KINDS)


def test_a_fleet_without_a_store_has_no_fault_of_one() -> None:
    schedules = [FaultSchedule.random(seed, 4, 100.0) for seed in range(50)]
    assert not any(schedule.needs_store for schedule in schedules)
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(KINDS) - set(STORE_KINDS)
    assert FaultSchedule.parse("3 store-gone for 2", 1).needs_store


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
        ("12 store-full", "lasts some time"),
        ("12 store-slow for 3", "factor above 0"),
        ("1 crash 0; nonsense", "nonsense"),
    ],
)
def test_a_schedule_that_cannot_be_read_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        FaultSchedule.parse(text, instances=4)


def test_faults_are_carried_out_in_order_of_time_whatever_the_order_of_the_text() -> None:
    schedule = FaultSchedule.parse("30 slow 1 for 20 by 4; 12.5 crash 2", instances=4)
    assert str(schedule) == "12.5 crash 2; 30 slow 1 for 20 by 4"
