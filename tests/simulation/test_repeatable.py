"""One seed, one history: to the last decision, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fleets import faulty_fleet, run_faulty

TESTS = Path(__file__).parents[1]
PROGRAM = "from support.fleets import run_faulty; print(run_faulty({seed}).decision_hash)"


def hash_in_a_process(seed: int, hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-c", PROGRAM.format(seed=seed)]
    return subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("seed", [3, 4, 8])  # without lower tiers, and with both
def test_the_same_seed_gives_the_same_decisions_under_any_hash_seed(seed: int) -> None:
    assert (faulty_fleet(seed).instance.engine.l3 is None) == (seed == 3)
    assert hash_in_a_process(seed, "0") == hash_in_a_process(seed, "4242") == run_faulty(seed).decision_hash


def test_another_seed_gives_other_decisions() -> None:
    assert run_faulty(3).decision_hash != run_faulty(4).decision_hash


def test_clocks_that_are_wrong_change_no_decision() -> None:
    """Messages carry durations and ages, never timestamps."""
    assert run_faulty(5, clock_spread_s=0.0).decision_hash == run_faulty(5, clock_spread_s=1e6).decision_hash


def test_looking_more_closely_changes_no_decision() -> None:
    assert run_faulty(6, check=True, sample_every_s=0.5).decision_hash == run_faulty(6).decision_hash
