"""Admission without head-of-line blocking (F2): who passes a sequence that does not fit, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.cache.manager import KVManager
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import RowResult, StepResult
from kllm.scheduling.scheduler import Scheduler

BLOCK = 4


class Loop:
    """A scheduler with 25 blocks of 4 tokens. started: request ids in the order of their admission."""

    def __init__(self, max_overtakes: int, num_blocks: int = 25) -> None:
        self.scheduler = Scheduler(
            KVManager(num_blocks, BLOCK, enable_prefix_caching=False),
            max_model_len=1000,
            max_num_seqs=16,
            max_tokens_per_step=200,
            max_overtakes=max_overtakes,
        )
        self.started: list[str] = []
        self.ended: list[str] = []

    def arrive(self, name: str, prompt: int, output: int) -> None:
        params = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
        request = Request(request_id=name, prompt_token_ids=[1] * prompt, params=params)
        assert self.scheduler.add(Submit(request=request), 0.0) is None

    def step(self) -> None:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return
        self.started += [new.request_id for new in plan.new if new.request_id not in self.started]
        rows = {step.row: RowResult(7) for step in plan.steps if step.sample}
        deltas = self.scheduler.commit(StepResult(plan.id, rows), 0.0)
        self.ended += [delta.request_id for delta in deltas if delta.finish_reason is not None]
        self.scheduler.check()


def full_house(max_overtakes: int) -> Loop:
    """A running request holds most of the KV for 30 steps; a long one waits, short ones behind it."""
    loop = Loop(max_overtakes)
    loop.arrive("holder", 60, 30)
    loop.step()
    loop.arrive("long", 60, 1)
    for number in range(12):
        loop.arrive(f"short {number}", 4, 1)
    return loop


def test_without_skipping_everybody_waits_behind_the_one_that_does_not_fit() -> None:
    loop = full_house(max_overtakes=0)
    for _ in range(20):
        loop.step()
    assert loop.started == ["holder"]


def test_short_ones_pass_and_after_so_many_room_is_reserved() -> None:
    loop = full_house(max_overtakes=5)
    for _ in range(20):
        loop.step()
    passed = [name for name in loop.started if name.startswith("short")]
    assert 5 <= len(passed) <= 9, "those admitted in the step that reached the limit included"
    while "long" not in loop.started:
        assert not [name for name in loop.started if name.startswith("short")][len(passed) :]
        loop.step()
    for _ in range(20):
        loop.step()
    assert len(loop.ended) == 14


def test_overtakes_are_counted() -> None:
    loop = full_house(max_overtakes=100)
    for _ in range(10):
        loop.step()
    assert loop.scheduler.load().overtakes == 12


def test_an_aborted_request_reserves_nothing() -> None:
    loop = full_house(max_overtakes=1)
    for _ in range(3):
        loop.step()
    loop.scheduler.abort(["long"])
    for _ in range(3):
        loop.step()
    assert sum(name.startswith("short") for name in loop.started) == 12


load = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 20)), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(load, st.integers(0, 6), st.integers(25, 60))
def test_everybody_is_served_and_nobody_is_passed_more_often_than_allowed(
    requests: list[tuple[int, int, int]], max_overtakes: int, num_blocks: int
) -> None:
    loop = Loop(max_overtakes, num_blocks)
    expected = 0
    for number, (gap, prompt, output) in enumerate(requests):
        for _ in range(gap):
            loop.step()
        if prompt + output - 1 <= num_blocks * BLOCK:
            loop.arrive(f"{number}", prompt, output)
            expected += 1
    for _ in range(5000):
        if not loop.scheduler.num_unfinished:
            break
        loop.step()
    assert len(loop.ended) == expected
    if max_overtakes == 0:
        assert loop.started == sorted(loop.started, key=int)


@pytest.mark.parametrize("max_overtakes", [0, 4])
def test_the_first_in_the_queue_gets_in_as_soon_as_it_fits(max_overtakes: int) -> None:
    loop = full_house(max_overtakes)
    while "holder" not in loop.ended:
        loop.step()
    loop.step()
    assert "long" in loop.started
