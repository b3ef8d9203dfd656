"""What an engine finds out about its own steps."""

from __future__ import annotations

import asyncio

import pytest

from kllm.cache.manager import KVManager
from kllm.costs.step import StepWork
from kllm.engine.core import EngineCore
from kllm.messages import EngineLoad, Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.scheduler import Scheduler
from kllm.simulation.executor import PlanningCost, SimulatedExecutor
from kllm.simulation.loop import run
from kllm.simulation.node import Node

STEP_S, TOKEN_S, CONTEXT_S = 0.01, 2e-5, 1e-6


class Times:
    def draw(self, work: StepWork) -> float:
        return STEP_S + TOKEN_S * work.new_tokens + CONTEXT_S * work.context


def serve(depth: int, planning_s: float, pause_s: float = 0.0) -> list[EngineLoad]:
    """Requests of many lengths, one after the other in pairs; a report after each pair."""

    async def main() -> list[EngineLoad]:
        loop = asyncio.get_running_loop()
        executor = SimulatedExecutor(
            Node(0, 1e9), Times(), vocab_size=100, depth=depth, planning=PlanningCost(step_s=planning_s)
        )
        scheduler = Scheduler(KVManager(1000, 8), max_model_len=4000, max_num_seqs=8, max_tokens_per_step=256)
        core, reports = EngineCore(scheduler, executor, loop.time), []
        for number in range(40):
            for name in ("a", "b"):
                prompt = [1 + (7 * number + position) % 90 for position in range(10 + 37 * number)]
                params = SamplingParams(max_tokens=5 + number, seed=0, ignore_eos=True)
                core.add(Submit(request=Request(request_id=f"{number}{name}", prompt_token_ids=prompt, params=params)))
            while True:
                core.fill()
                if core.oldest is None:
                    break
                core.commit(await asyncio.wrap_future(core.oldest))
            reports.append(core.load())
            await asyncio.sleep(pause_s)
        return reports

    return run(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_reports_say_how_long_steps_take(depth: int) -> None:
    times = serve(depth, 0.0)[-1].step_times
    assert times is not None
    assert times.samples > 50
    assert times.base == pytest.approx(STEP_S, rel=0.01)
    assert times.new_token == pytest.approx(TOKEN_S, rel=0.01)
    assert times.context_token == pytest.approx(CONTEXT_S, rel=0.02)


def test_what_keeps_the_next_step_waiting_is_part_of_it() -> None:
    waits, overlaps = (serve(depth, planning_s=0.004)[-1].step_times for depth in (1, 2))
    assert waits is not None
    assert overlaps is not None
    assert waits.base == pytest.approx(STEP_S + 0.004, rel=0.05)
    assert overlaps.base == pytest.approx(STEP_S, rel=0.05)  # planned while the one before ran


def test_waiting_for_work_is_not() -> None:
    times = serve(1, 0.0, pause_s=10.0)[-1].step_times
    assert times is not None
    assert times.base == pytest.approx(STEP_S, rel=0.01)


def test_before_any_step_nothing_is_known() -> None:
    async def main() -> EngineLoad:
        scheduler = Scheduler(KVManager(10, 8), max_model_len=40, max_num_seqs=8, max_tokens_per_step=256)
        executor = SimulatedExecutor(Node(0, 1e9), Times(), vocab_size=100)
        return EngineCore(scheduler, executor, asyncio.get_running_loop().time).load()

    times = run(main()).step_times
    assert times is not None
    assert times.samples == 0
