"""Seeded faults over a fleet of four: every request ends once, no token is lost or repeated, no block is leaked.

    KLLM_FAULT_SEEDS=0-999 pytest tests/simulation/test_nothing_is_lost.py      (make test-faults)

A failure prints the schedule; `KLLM_FAULT_SEEDS=SEED` runs it again, decision for decision.
"""

from __future__ import annotations

import os

import pytest
from support.fleets import faulty_fleet, run_faulty

QUICK_SEEDS = "0-59"
SLOW_SEEDS = range(60, 1000)
SEEDS_A_TEST = 94


def chosen_seeds() -> range:
    first, _, last = os.environ.get("KLLM_FAULT_SEEDS", QUICK_SEEDS).partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.parametrize("seed", chosen_seeds())
def test_nothing_is_lost(seed: int) -> None:
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW_SEEDS[::SEEDS_A_TEST])
def test_nothing_is_lost_under_the_rest_of_a_thousand(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        check_seed(seed)


def check_seed(seed: int) -> None:
    schedule = str(faulty_fleet(seed).faults)
    try:
        result = run_faulty(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed} broke under the faults: {schedule}") from error
    endings = {outcome.ending for outcome in result.outcomes}
    assert endings <= {"completed", "abort"}, f"seed {seed}: a request failed although instances came back: {schedule}"
    assert sum(outcome.ending == "completed" for outcome in result.outcomes) > 90
