"""Instances that fail their requests get none for a while."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from support.gateways import read, started
from support.scripted_instance import TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.breaker import FIRST_PAUSE_S, LEAST_FAILURES, LONGEST_PAUSE_S, Breaker
from kllm.cluster.routing import RoundRobin


def test_opens_after_failures_in_a_row_and_tries_again() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(0.0) for _ in range(LEAST_FAILURES - 1))
    assert breaker.failed(0.0)
    assert not breaker.allows(FIRST_PAUSE_S / 2)
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.submitted(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S), "one is enough to try it"
    assert breaker.failed(3.0), "and if that fails too, the pause is longer"
    assert not breaker.allows(3.0 + FIRST_PAUSE_S)
    later = 3.0 + 2 * FIRST_PAUSE_S
    assert breaker.allows(later)
    breaker.submitted(later)
    breaker.succeeded()
    assert breaker.state(later) == "closed"
    assert breaker.trips == 2


def test_a_trial_without_a_result_is_followed_by_another() -> None:
    """Its client left, or found its stop string."""
    breaker = Breaker()
    for _ in range(LEAST_FAILURES):
        breaker.failed(0.0)
    breaker.submitted(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S)
    breaker.undecided()
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.submitted(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.state(FIRST_PAUSE_S) == "closed"


def test_few_failures_among_successes_do_not_matter() -> None:
    breaker = Breaker()
    for _ in range(100):
        for _ in range(3):
            breaker.succeeded()
        assert not breaker.failed(0.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["ok", "failed", "submitted"])), max_size=100))
def test_is_never_closed_for_good(events: list[tuple[float, str]]) -> None:
    breaker, now = Breaker(), 0.0
    for wait, event in events:
        now += wait
        if event == "ok":
            breaker.succeeded()
        elif event == "failed":
            breaker.failed(now)
        elif breaker.allows(now):
            breaker.submitted(now)
    assert breaker.state(now + LONGEST_PAUSE_S) != "open"


def test_the_gateway_avoids_an_instance_that_fails_requests() -> None:
    async def main() -> None:
        sick, well = TaskLauncher(), TaskLauncher()
        async with started(sick, well, router=RoundRobin()) as gateway:
            await asyncio.sleep(1)
            sick.faults.failing = True
            errors = 0
            for number in range(60):
                deltas = await read(gateway.generate(make_request(f"r{number}", max_tokens=2, ignore_eos=True)))
                errors += deltas[-1].finish_reason == "error"
            assert errors == LEAST_FAILURES, "then it is left alone"
            sick.faults.failing = False
            await asyncio.sleep(FIRST_PAUSE_S)
            before = len(sick.scripts[-1].submits)
            for number in range(10):
                await read(gateway.generate(make_request(f"s{number}", max_tokens=2, ignore_eos=True)))
            assert len(sick.scripts[-1].submits) >= before + 5, "it works, and takes its share again"

    run(main())


def test_where_all_are_sick_one_of_them_is_used() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            launcher.faults.failing = True
            for number in range(20):
                deltas = await read(gateway.generate(make_request(f"r{number}", max_tokens=2)))
                assert deltas[-1].finish_reason == "error"
            assert gateway._slots[0].breaker.trips >= 1

    run(main())
