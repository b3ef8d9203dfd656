"""Requests that are only prefilled here, and those that go on here after a prefill elsewhere."""

from __future__ import annotations

import pytest
from support.scheduler_loop import make_request
from support.simulated_runner import SimulatedRunner

from kllm.cache.manager import KVManager
from kllm.messages import KvSource, Submit
from kllm.request import Delta
from kllm.scheduling.plan import StepResult
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.sequence import Sequence

KV = KvSource(lease="x", address="shm:x", page_bytes=1, slots=[0], checksums=[0])


def make_scheduler(num_blocks: int = 40, **options: object) -> Scheduler:
    kv = KVManager(num_blocks, 4, True)
    return Scheduler(kv, max_model_len=100, max_num_seqs=4, max_tokens_per_step=16, **options)  # type: ignore[arg-type]


def drive(scheduler: Scheduler, depth: int = 1) -> tuple[list[Delta], list[Sequence]]:
    """Until nothing is left: the deltas, and what is to be handed over."""
    kv = scheduler.kv
    runner = SimulatedRunner(kv.pool.num_blocks, kv.block_tokens, vocab_size=1000, depth=depth)
    in_flight = 0
    deltas: list[Delta] = []
    prefilled: list[Sequence] = []
    while scheduler.num_unfinished or in_flight:
        while in_flight < depth and (plan := scheduler.plan(0.0)) is not None:
            runner.submit(plan)
            in_flight += 1
        result = runner.advance()
        in_flight -= 1
        deltas += scheduler.commit(result, 0.0)
        runner.committed(result.plan_id)
        prefilled += scheduler.take_prefilled()
        scheduler.check()
    return deltas, prefilled


@pytest.mark.parametrize("depth", [1, 2])
def test_ends_with_its_first_token(depth: int) -> None:
    scheduler = make_scheduler()
    request = make_request("r", list(range(1, 31)), max_tokens=20, ignore_eos=True)
    assert scheduler.add(Submit(request=request, prefill_only=True), 0.0) is None
    deltas, [sequence] = drive(scheduler, depth)
    [delta] = deltas
    assert len(delta.token_ids) == 1
    assert delta.finish_reason is None
    assert sequence.computed == 30
    assert scheduler.kv.cached_tokens(sequence.tokens, "", "") == 28, "its whole blocks stay cached"
    assert scheduler.kv.clear()


def test_goes_on_after_outputs_of_before() -> None:
    scheduler = make_scheduler()
    request = make_request("r", list(range(1, 11)), max_tokens=20, ignore_eos=True)
    scheduler.add(Submit(request=request, outputs=[7, 8, 9], attempt=4, prefill_only=True), 0.0)
    [delta], [sequence] = drive(scheduler)
    assert (delta.index, delta.attempt) == (3, 4)
    assert sequence.num_outputs == 4


@pytest.mark.parametrize("params", [{"max_tokens": 1, "ignore_eos": True}, {"max_tokens": 5, "stop_token_ids": "all"}])
def test_one_that_ends_with_its_first_token_is_not_handed_over(params: dict[str, object]) -> None:
    if params.get("stop_token_ids") == "all":
        params = {**params, "stop_token_ids": tuple(range(1000))}
    scheduler = make_scheduler()
    scheduler.add(Submit(request=make_request("r", [1, 2, 3], **params), prefill_only=True), 0.0)
    [delta], prefilled = drive(scheduler)
    assert delta.finish_reason == ("length" if params["max_tokens"] == 1 else "stop")
    assert not prefilled


def test_needs_room_for_its_prompt_only() -> None:
    """Prompt and output would need more than the cache holds; the output is made elsewhere."""
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("r", list(range(1, 37)), max_tokens=40, ignore_eos=True)
    refused = scheduler.add(Submit(request=request), 0.0)
    assert refused is not None
    assert refused.invalid
    assert scheduler.add(Submit(request=request, attempt=1, prefill_only=True), 0.0) is None
    _, prefilled = drive(scheduler)
    assert len(prefilled) == 1
    longer = make_request("s", list(range(1, 43)), max_tokens=40, ignore_eos=True)
    refused = scheduler.add(Submit(request=longer, prefill_only=True), 0.0)
    assert refused is not None, "not even the prompt fits"


def test_aborted_before_its_token_is_not_handed_over() -> None:
    scheduler = make_scheduler()
    scheduler.add(Submit(request=make_request("r", list(range(1, 31)), max_tokens=20), prefill_only=True), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(["r"])
    assert scheduler.commit(StepResult(plan.id), 0.0) == []
    assert scheduler.take_prefilled() == []


def test_what_was_looked_up_elsewhere_is_not_counted_again() -> None:
    scheduler = make_scheduler()
    request = make_request("r", list(range(1, 31)), max_tokens=3, ignore_eos=True)
    scheduler.add(Submit(request=request, outputs=[5], attempt=1, kv=KV), 0.0)
    drive(scheduler)
    load = scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (0, 0)
