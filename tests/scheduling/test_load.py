"""What the scheduler says of its load, and of what a plan computes."""

from __future__ import annotations

import random

import pytest
from support.scheduler_loop import SchedulerLoop, make_request

from kllm.costs.step import step_work
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan_rows import PlanRows


def test_prompts_that_are_computed_and_requests_that_decode() -> None:
    loop = SchedulerLoop(num_blocks=64, max_tokens_per_step=10)
    assert (loop.scheduler.load().lacking, loop.scheduler.load().decoding, loop.scheduler.load().context) == (0, 0, 0)
    loop.add(make_request("a", list(range(1, 25)), max_tokens=8, ignore_eos=True))
    loop.add(make_request("b", list(range(30, 35)), max_tokens=8, ignore_eos=True))
    assert loop.scheduler.load().lacking == 24 + 5
    loop.plan()
    assert loop.scheduler.load().lacking == 24 + 5  # what is in flight is still to be done
    loop.commit()
    load = loop.scheduler.load()
    assert (load.lacking, load.decoding, load.context) == (24 + 5 - 10, 0, 10)
    while loop.scheduler.load().lacking:
        loop.step()
    load = loop.scheduler.load()
    assert load.decoding == load.running == 2
    tokens = sum(24 * (name == "a") + 5 * (name == "b") + len(client.tokens) for name, client in loop.clients.items())
    assert load.context == tokens - 2  # the last ones have no KV yet


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_decodes_lacks_nothing_while_plans_are_in_flight(depth: int) -> None:
    loop = SchedulerLoop(num_blocks=64, depth=depth)
    loop.add(make_request("a", [1, 2, 3], max_tokens=20, ignore_eos=True))
    for _ in range(5):
        loop.step()
        while loop.num_in_flight < depth and loop.plan():
            pass
        assert (loop.scheduler.load().decoding, loop.scheduler.load().lacking) == (1, 0)


def test_oldest_without_a_token() -> None:
    loop = SchedulerLoop(num_blocks=64, max_num_seqs=1)
    scheduler = loop.scheduler
    assert scheduler.oldest_wait(5.0) == 0.0
    loop.add(make_request("a", [1, 2, 3], max_tokens=20, ignore_eos=True))
    loop.now = 2.0
    loop.add(make_request("b", [1, 2, 3], max_tokens=20, ignore_eos=True))
    assert scheduler.oldest_wait(5.0) == 5.0
    loop.step()
    assert scheduler.oldest_wait(5.0) == 3.0
    resumed = Request(request_id="b", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=20, seed=0))
    scheduler.add(Submit(request=resumed, outputs=[7], attempt=1), 2.5)
    assert scheduler.oldest_wait(5.0) == 0.0  # its client has one


@pytest.mark.parametrize("seed", range(8))
def test_work_of_a_plan_is_what_a_runner_computes(seed: int) -> None:
    rng, rows = random.Random(seed), PlanRows()
    loop = SchedulerLoop(num_blocks=24, depth=1 + seed % 2, max_tokens_per_step=24, max_num_seqs=6)
    for number in range(25):
        if number < 15:
            prompt = [rng.randrange(1, 40) for _ in range(rng.choice((1, 3, 8, 30)))]
            loop.add(make_request(f"{number}", prompt, max_tokens=rng.randint(1, 12), ignore_eos=True))
        loop.step()
    loop.run()
    assert len(loop.plans) > 20
    for plan in loop.plans:
        assert rows.apply(plan)[0] == plan.work
    assert step_work([]) == type(loop.plans[0].work)()
