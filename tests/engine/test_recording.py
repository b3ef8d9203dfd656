"""Recorded steps say what was computed, whatever the executor."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from kllm.engine.recording import RecordedStep, RecordingExecutor
from kllm.request import SamplingParams
from kllm.scheduling.plan import Late, NewRow, Plan, RowStep, StepResult


class InstantExecutor:
    depth = 1

    def __init__(self) -> None:
        self.closed = False
        self.bound: list[int] = []

    def submit(self, plan: Plan) -> Future[StepResult]:
        done: Future[StepResult] = Future()
        if plan.id == 2:
            done.set_exception(RuntimeError("broken"))
        else:
            done.set_result(StepResult(plan.id, {}, 0.25))
        return done

    def bind(self, plan_id: int, late: Late) -> None:
        self.bound.append(plan_id)

    def close(self) -> None:
        self.closed = True


def new_row(row: int, tokens: int, start: int = 0) -> NewRow:
    return NewRow(row, f"r{row}", list(range(tokens)), tokens, start, [], SamplingParams(), seed=7)


def test_steps_are_written_as_they_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    inner = InstantExecutor()
    executor = RecordingExecutor(inner, path)
    executor.submit(Plan(0, [RowStep(0, 4, [], sample=False)], [new_row(0, 6)]))
    executor.submit(Plan(1, [RowStep(0, 2, [], sample=True), RowStep(1, 3, [], sample=True)], [new_row(1, 19, 16)]))
    executor.submit(Plan(2, [RowStep(1, 1, [], sample=True)], ended=[0]))
    executor.bind(1, Late())
    steps = [msgspec.json.decode(line, type=RecordedStep) for line in path.read_bytes().splitlines()]
    executor.close()

    assert len(steps) == 2, "a step that failed took no time that means anything"
    assert [step.idle_s is None for step in steps] == [True, False], "before the first it may have waited for work"
    first, second = (step.work for step in steps)
    assert (first.rows, first.new_tokens, first.sampled, first.context, first.attended) == (1, 4, 0, 4, 10)
    assert (second.rows, second.new_tokens, second.sampled, second.context) == (2, 5, 2, 6 + 19)
    assert second.attended == 5 + 6 + 17 + 18 + 19
    assert all(step.seconds == 0.25 for step in steps)
    assert inner.bound == [1]
    assert inner.closed


def test_a_full_disk_ends_the_recording_and_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    executor = RecordingExecutor(InstantExecutor(), Path("/dev/full"))
    for number in range(2):
        plan = Plan(number, [RowStep(0, 2, [], sample=False)], [new_row(0, 6)] if number == 0 else [])
        assert executor.submit(plan).result().elapsed_s == 0.25
    executor.close()
    assert [record.message for record in caplog.records] == [
        "the recording of steps ends: /dev/full: No space left on device"
    ]
