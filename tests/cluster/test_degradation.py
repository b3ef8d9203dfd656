"""What is given up when capacity is short, and what comes back."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateways import started
from support.scripted_instance import HELLO, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.degradation import DOWN_S, RELIEF, THRESHOLDS, UP_S, Degradation, queue_limit
from kllm.cluster.gateway import QueueFull
from kllm.cluster.slo_snapshot import SloLimits


def test_a_short_peak_changes_nothing() -> None:
    degradation = Degradation()
    assert not any(degradation.update(now, load) for now, load in enumerate((0.5, 1.4, 0.5, 1.4, 0.5)))
    assert degradation.grade == 0


def test_up_while_it_lasts_and_down_one_by_one() -> None:
    degradation = Degradation()
    grades = []
    for now in range(10):
        degradation.update(now, 3.0)
        grades.append(degradation.grade)
    assert grades == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    changes = [now for now in range(10, 60) if degradation.update(now, 0.5)]
    assert degradation.grade == 0
    assert len(changes) == 3
    assert all(later - earlier > DOWN_S - 1 for earlier, later in itertools.pairwise(changes))


@given(st.lists(st.floats(0, 5), max_size=200))
def test_never_further_than_the_load_allows(loads: list[float]) -> None:
    """Up only after UP_S above the next threshold, down only after DOWN_S below relief of the present one."""
    degradation = Degradation()
    for now, load in enumerate(loads):
        before = degradation.grade
        changed = degradation.update(now, load)
        assert changed == (degradation.grade != before)
        recent = loads[: now + 1]
        if degradation.grade > before:
            assert degradation.grade == before + 1
            assert min(recent[-int(UP_S) - 1 :]) >= THRESHOLDS[before]
        elif degradation.grade < before:
            assert degradation.grade == before - 1
            assert max(recent[-int(DOWN_S) - 1 :]) < RELIEF * THRESHOLDS[before - 1]


@given(st.integers(0, 3), st.integers(-5, 5), st.integers(1, 1000), st.integers(0, 1000))
def test_the_more_urgent_is_never_refused_before_others(grade: int, priority: int, most: int, at_once: int) -> None:
    limit = queue_limit(grade, priority, most, at_once)
    assert 0 <= limit <= most
    assert limit <= queue_limit(grade, priority - 1, most, at_once)
    assert grade == 0 or limit <= queue_limit(grade - 1, priority, most, at_once)
    if grade < 2 or priority < 0:
        assert limit == most


def test_grades_reach_instances_and_the_queue() -> None:
    """Requests that wait without an answer are late: SLO Load grows with their age, grade after grade."""

    async def main() -> None:
        launcher = TaskLauncher(hello=msgspec.structs.replace(HELLO, max_num_seqs=4))
        async with started(launcher, slo=SloLimits(1.0, 0.1), degrade=True, max_queue=100) as gateway:
            launcher.faults.stuck = True
            streams = [gateway.generate(make_request(f"r{i}", max_tokens=20, ignore_eos=True)) for i in range(10)]
            await asyncio.sleep(20)
            assert gateway.grade == 3
            script = launcher.scripts[-1]
            assert script.grade == 3, "it was told"
            with pytest.raises(QueueFull, match=r"10 requests are in flight, and capacity is short \(grade 3\)"):
                gateway.generate(make_request("usual"))
            urgent = msgspec.structs.replace(make_request("urgent", max_tokens=20, ignore_eos=True), priority=-1)
            streams.append(gateway.generate(urgent))
            launcher.faults.stuck = False
            for stream in streams:
                async for _ in stream:
                    pass
            await asyncio.sleep(120)
            assert gateway.grade == 0
            assert script.grade == 0

    run(main())


def test_a_request_that_is_late_by_itself_is_no_reason_to_refuse_others() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, slo=SloLimits(0.1, 0.1), degrade=True) as gateway:
            launcher.faults.stuck = True
            stream = gateway.generate(make_request("r", max_tokens=20))
            await asyncio.sleep(60)
            assert gateway.grade == 0
            await stream.aclose()

    run(main())


def test_what_was_late_before_keeps_no_grade_up_where_nothing_is_left() -> None:
    """The typical request of before may miss the SLO even alone; nobody is there to see it."""

    async def main() -> None:
        launcher = TaskLauncher(hello=msgspec.structs.replace(HELLO, max_num_seqs=4))
        async with started(launcher, slo=SloLimits(1e-6, 1e-6), degrade=True, max_queue=100) as gateway:
            launcher.faults.stuck = True
            streams = [gateway.generate(make_request(f"r{i}", max_tokens=20, ignore_eos=True)) for i in range(10)]
            await asyncio.sleep(20)
            assert gateway.grade == 3
            launcher.faults.stuck = False
            for stream in streams:
                async for _ in stream:
                    pass
            await asyncio.sleep(35)
            assert gateway.grade == 0

    run(main())


def test_off_by_default() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, slo=SloLimits(0.1, 0.1)) as gateway:
            launcher.faults.stuck = True
            gateway.generate(make_request("r", max_tokens=20))
            await asyncio.sleep(20)
            assert gateway.grade == 0

    run(main())
