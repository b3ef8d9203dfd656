"""What a scheduler promises, case by case, on a runner without a model."""

from __future__ import annotations

from array import array

import pytest
from support.scheduler_loop import JSON, SchedulerLoop, make_request
from support.simulated_runner import reference_output

from kllm.cache.manager import Holding
from kllm.messages import Submit
from kllm.request import Delta, Request
from kllm.scheduling.plan import Plan, RowResult, StepResult
from kllm.scheduling.queue_policy import QUEUE_KEYS


def endless(request_id: str, prompt: list[int], max_tokens: int = 20, **fields: object) -> Request:
    return make_request(request_id, prompt, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [first + i % 40 for i in range(length)]


def counts(plan: Plan | None) -> list[int]:
    return [step.count for step in plan.steps] if plan is not None else []


# -- plans ---------------------------------------------------------------------------------------------------


def test_decoding_goes_before_prompts_and_prompts_share_what_is_left() -> None:
    loop = SchedulerLoop(num_blocks=100, max_tokens_per_step=10)
    loop.add(endless("a", prompt_of(8)))
    assert counts(loop.plan()) == [8]
    loop.commit()
    loop.add(endless("b", prompt_of(30, 5)))
    loop.add(endless("c", prompt_of(3, 7)))
    seen = []
    for _ in range(5):
        seen.append(counts(loop.plan()))
        loop.commit()
    assert seen == [[1, 9], [1, 9], [1, 9], [1, 3, 3], [1, 1, 1]]


def test_a_prompt_is_cut_into_chunks_and_sampled_once() -> None:
    loop = SchedulerLoop(num_blocks=100, max_tokens_per_step=32, prefill_chunk=5)
    loop.add(endless("a", prompt_of(12), max_tokens=2))
    steps = []
    while (plan := loop.plan()) is not None:
        steps.append((plan.steps[0].count, plan.steps[0].sample))
        loop.commit()
    assert steps == [(5, False), (5, False), (2, True), (1, True)]


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_are_deltas(depth: int) -> None:
    """Tokens and blocks travel once; a row that goes on costs its number, a count and new blocks."""
    loop = SchedulerLoop(num_blocks=100, depth=depth, max_tokens_per_step=16)
    client = loop.add(endless("a", prompt_of(40), max_tokens=30))
    loop.run()
    assert [len(plan.new) for plan in loop.plans] == [1] + [0] * (len(loop.plans) - 1)
    assert loop.plans[0].new[0].tokens == client.request.prompt_token_ids
    sent = [block for plan in loop.plans for step in plan.steps for block in step.blocks]
    assert len(sent) + len(loop.plans[0].new[0].blocks) == loop.kv.blocks_for(40 + 29)
    assert all(len(step.blocks) <= 1 for plan in loop.plans[3:] for step in plan.steps)


def test_a_row_is_told_to_have_ended_with_the_next_plan_and_used_again() -> None:
    loop = SchedulerLoop(num_blocks=20, max_num_seqs=1)
    loop.add(endless("a", prompt_of(4), max_tokens=1))
    loop.add(endless("b", prompt_of(4, 9), max_tokens=1))
    loop.step()
    plan = loop.plan()
    assert plan is not None
    assert (plan.ended, [new.request_id for new in plan.new]) == ([0], ["b"])


def test_nothing_to_do_is_no_plan() -> None:
    loop = SchedulerLoop(num_blocks=20)
    assert loop.plan() is None
    loop.add(endless("a", prompt_of(4), structured_outputs=JSON), held=True)
    assert loop.plan() is None
    loop.scheduler.unhold("a")
    loop.scheduler.unhold("a")
    loop.scheduler.unhold("unknown")
    assert loop.plan() is not None


def test_at_depth_two_nothing_is_planned_beyond_the_last_token() -> None:
    loop = SchedulerLoop(num_blocks=20, depth=2)
    loop.add(endless("a", prompt_of(4), max_tokens=2))
    assert counts(loop.plan()) == [4]
    assert counts(loop.plan()) == [1]
    loop.commit()
    assert loop.plan() is None
    loop.commit()
    loop.check_idle()


def test_results_are_taken_in_the_order_of_plans() -> None:
    loop = SchedulerLoop(num_blocks=20)
    loop.add(endless("a", prompt_of(4)))
    loop.plan()
    with pytest.raises(RuntimeError, match="plan 7 completed, 0 was next"):
        loop.scheduler.commit(StepResult(7), 0.0)


def test_a_missing_token_is_a_broken_executor() -> None:
    loop = SchedulerLoop(num_blocks=20)
    loop.add(endless("a", prompt_of(4)))
    loop.plan()
    with pytest.raises(RuntimeError, match="no token for row 0"):
        loop.scheduler.commit(StepResult(0), 0.0)


@pytest.mark.parametrize("invalid", [True, False])
def test_an_error_of_one_row_ends_that_request_only(invalid: bool) -> None:
    loop = SchedulerLoop(num_blocks=20)
    for name, first in (("a", 1), ("b", 20)):
        loop.scheduler.add(Submit(request=endless(name, prompt_of(4, first))), 0.0)
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    broken = RowResult(error="broken", invalid=invalid)
    rows = {new.row: broken if new.request_id == "a" else RowResult(token=5) for new in plan.new}
    deltas = {delta.request_id: delta for delta in loop.scheduler.commit(StepResult(0, rows), 0.0)}
    assert (deltas["a"].finish_reason, deltas["a"].error, deltas["a"].token_ids) == ("error", "broken", [])
    assert deltas["a"].invalid is invalid
    assert (deltas["b"].finish_reason, deltas["b"].token_ids) == (None, [5])
    loop.scheduler.check()


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 5, "the prompt is empty"),
        (100, 5, "the prompt has 100 tokens, the model's length is 100"),
        (120, None, "the prompt has 120 tokens, the model's length is 100"),
        (60, 30, "prompt and output need 89 tokens of KV cache, all of it holds 80"),
        (81, 1, "prompt and output need 81 tokens of KV cache, all of it holds 80"),
        (81, None, "prompt and output need 99 tokens of KV cache, all of it holds 80"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(length: int, max_tokens: int | None, message: str) -> None:
    loop = SchedulerLoop(num_blocks=20, max_model_len=100)
    client = loop.add(make_request("a", prompt_of(length), max_tokens=max_tokens))
    assert client.last == Delta(request_id="a", finish_reason="error", error=message, invalid=True)
    assert loop.plan() is None
    loop.check_idle()


def test_a_token_id_that_is_none_is_refused() -> None:
    loop = SchedulerLoop(num_blocks=20, max_model_len=100)
    client = loop.add(make_request("a", [1, 2**31, 3], max_tokens=3))
    assert client.last == Delta(
        request_id="a", finish_reason="error", error="a token id is no 32-bit number", invalid=True
    )
    loop.check_idle()


@pytest.mark.parametrize(("length", "max_tokens", "outputs"), [(80, 1, 1), (80, None, 1), (61, 20, 20), (70, None, 11)])
def test_the_largest_admissible_requests_run(length: int, max_tokens: int | None, outputs: int) -> None:
    loop = SchedulerLoop(num_blocks=20, max_model_len=100)
    client = loop.add(make_request("a", prompt_of(length), max_tokens=max_tokens, ignore_eos=True))
    loop.run()
    assert client.last is not None
    assert (client.last.finish_reason, len(client.tokens)) == ("length", outputs)
    loop.check_idle()


# -- ends ----------------------------------------------------------------------------------------------------


def ends(depth: int = 1, outputs: list[int] | None = None, **fields: object):
    loop = SchedulerLoop(num_blocks=100, depth=depth, eos=0)
    client = loop.add(make_request("a", prompt_of(7), **fields))
    loop.run()
    loop.check_idle()
    assert client.last is not None
    return client.tokens, client.last.finish_reason, client.last.stop_reason


@pytest.mark.parametrize("depth", [1, 2])
def test_ends_by_eos_stop_ids_and_length(depth: int) -> None:
    seed = next(
        seed
        for seed in range(1000)
        if 5
        < len(
            reference_output(
                make_request("a", prompt_of(7), max_tokens=30, seed=seed), vocab_size=48, eos=0, length=99
            )[0]
        )
        < 20
    )
    natural, reason, stop = ends(depth, max_tokens=30, seed=seed)
    assert (natural[-1], reason, stop) == (0, "stop", None)
    length = len(natural)
    ignoring, reason, stop = ends(depth, max_tokens=30, seed=seed, ignore_eos=True)
    assert (ignoring[:length], len(ignoring), reason, stop) == (natural, 30, "length", None)
    assert ends(depth, max_tokens=4, seed=seed) == (natural[:4], "length", None)
    third = natural[2]
    first_place = natural.index(third) + 1
    assert ends(depth, max_tokens=30, seed=seed, stop_token_ids=(third,)) == (natural[:first_place], "stop", third)
    assert ends(depth, max_tokens=30, seed=seed, min_tokens=length) == (natural, "stop", None)
    beyond, _, _ = ends(depth, max_tokens=30, seed=seed, min_tokens=length + 1)
    assert (beyond[:length], len(beyond) > length) == (natural, True)
    late, _, stop = ends(depth, max_tokens=30, seed=seed, min_tokens=first_place + 1, stop_token_ids=(third,))
    assert len(late) > first_place


def test_structured_output_ends_by_eos_even_if_it_is_to_be_ignored() -> None:
    seen = {ends(max_tokens=200, seed=seed, ignore_eos=True, structured_outputs=JSON)[1] for seed in range(3)}
    assert "stop" in seen


def test_a_request_that_fails_from_outside_ends_once() -> None:
    loop = SchedulerLoop(num_blocks=50)
    running, held = loop.add(endless("a", prompt_of(5))), loop.add(endless("b", prompt_of(5, 9)), held=True)
    loop.step()
    loop.step()
    loop.fail(held, "no such grammar")
    loop.fail(running, "the grammar broke")
    assert running.last == Delta(request_id="a", index=2, finish_reason="error", error="the grammar broke")
    assert held.last == Delta(request_id="b", finish_reason="error", error="no such grammar")
    assert loop.scheduler.fail("a", "again") is None
    assert loop.scheduler.fail("unknown", "x") is None
    loop.check_idle()


# -- deltas --------------------------------------------------------------------------------------------------


def test_deltas_say_what_was_cached_and_how_long_it_took() -> None:
    loop = SchedulerLoop(num_blocks=50, max_num_seqs=1, max_tokens_per_step=8)
    first = loop.add(endless("a", prompt_of(16), max_tokens=2))
    second = loop.add(endless("b", prompt_of(16), max_tokens=2))
    loop.run()
    assert [delta.num_cached_tokens for delta in first.deltas] == [0, 0]
    assert [delta.num_cached_tokens for delta in second.deltas] == [12, 12], "the last prompt token is computed again"
    assert [delta.index for delta in second.deltas] == [0, 1]
    assert first.timings[0].queue_s == pytest.approx(0.0)
    assert first.timings[0].prefill_s == pytest.approx(0.02)
    assert second.timings[0].queue_s == pytest.approx(0.03)
    assert second.timings[0].prefill_s == pytest.approx(0.01)
    load = loop.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits, load.running, load.waiting) == (32, 12, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_resubmission_goes_on_after_the_outputs_it_brings(depth: int) -> None:
    loop = SchedulerLoop(num_blocks=50, depth=depth)
    client = loop.add(endless("a", prompt_of(9), max_tokens=12))
    for _ in range(5):
        loop.step()
    had = len(client.tokens)
    assert had > 0
    loop.resubmit(client)
    loop.run()
    tokens, _, _ = reference_output(client.request, vocab_size=48, eos=0, length=10_000)
    assert client.tokens == tokens
    assert [delta.attempt for delta in client.deltas] == [0] * had + [1] * (12 - had)
    assert len(client.timings) == 2
    loop.check_idle()


def test_a_resubmission_that_has_all_its_output_ends_at_once() -> None:
    loop = SchedulerLoop(num_blocks=50)
    request = make_request("a", prompt_of(9), max_tokens=3, stop_token_ids=(7,))
    cases = [([1, 2, 3], "length", None), ([4, 0], "stop", None), ([7], "stop", 7)]
    for outputs, reason, stop in cases:
        delta = loop.scheduler.add(Submit(request=request, outputs=outputs, attempt=1), 0.0)
        assert delta == Delta(request_id="a", attempt=1, index=len(outputs), finish_reason=reason, stop_reason=stop)
    loop.check_idle()


# -- aborts --------------------------------------------------------------------------------------------------


def test_an_abort_between_steps_frees_the_blocks_at_once() -> None:
    loop = SchedulerLoop(num_blocks=20)
    client = loop.add(endless("a", prompt_of(9)))
    loop.step()
    loop.abort(client)
    loop.check_idle()
    assert loop.plan() is None


def test_an_abort_frees_the_blocks_when_the_plans_in_flight_have_committed() -> None:
    """Blocks in the tree stay cached and count as available; nothing is before that."""
    loop = SchedulerLoop(num_blocks=20, depth=2)
    client = loop.add(endless("a", prompt_of(10)))
    loop.plan()
    loop.plan()
    loop.commit()
    loop.plan()
    assert loop.num_in_flight == 2
    loop.abort(client)
    assert loop.kv.available == 20 - 3
    loop.commit()
    assert loop.kv.available == 20 - 3
    loop.commit()
    loop.check_idle()


def test_an_abort_waits_only_for_the_plans_that_name_the_request() -> None:
    """Plan 1 is the last of "a" (it will end by length); plan 2 names "b" only and holds up nothing of "a"."""
    loop = SchedulerLoop(num_blocks=20, depth=2)
    short = loop.add(endless("a", prompt_of(3), max_tokens=2))
    loop.add(endless("b", prompt_of(9, 9), max_tokens=9))
    loop.plan()
    loop.plan()
    loop.commit()
    loop.plan()
    loop.abort(short)
    assert loop.kv.available == 20 - 1 - 3
    loop.commit()
    assert loop.kv.available == 20 - 3


def test_aborts_of_waiting_held_following_and_unknown_requests() -> None:
    loop = SchedulerLoop(num_blocks=20, max_num_seqs=1)
    leader = loop.add(endless("a", prompt_of(9)))
    others = [
        loop.add(endless("waiting", prompt_of(3))),
        loop.add(endless("held", prompt_of(3)), held=True),
        loop.add(endless("following", prompt_of(9), leader="a")),
    ]
    loop.plan()
    loop.abort(*others)
    loop.scheduler.abort(["unknown"])
    loop.commit()
    loop.abort(leader)
    loop.check_idle()


# -- several outputs of one prompt ---------------------------------------------------------------------------


def test_followers_wait_for_the_prompt_of_their_leader_and_share_its_blocks() -> None:
    loop = SchedulerLoop(num_blocks=100, max_tokens_per_step=16)
    clients = [loop.add(endless("a", prompt_of(33), max_tokens=5))]
    clients += [loop.add(endless(f"a{i}", prompt_of(33), max_tokens=5, seed=i, leader="a")) for i in range(1, 4)]
    loop.run()
    assert [client.deltas[-1].num_cached_tokens for client in clients] == [0, 32, 32, 32]
    assert len({tuple(client.tokens) for client in clients}) == 4
    assert loop.runner.tokens_computed == 33 + 4 * 4 + 3
    loop.check_idle()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_followers_go_on_alone_when_their_leader_ends(how: str) -> None:
    loop = SchedulerLoop(num_blocks=100, max_tokens_per_step=16)
    leader = loop.add(endless("a", prompt_of(33)), held=how == "fail")
    follower = loop.add(endless("b", prompt_of(33), leader="a", max_tokens=3))
    loop.step()
    assert not follower.deltas
    if how == "abort":
        loop.abort(leader)
    else:
        loop.fail(leader, "x")
    loop.run()
    assert len(follower.tokens) == 3
    loop.check_idle()


def test_a_held_follower_waits_for_both() -> None:
    loop = SchedulerLoop(num_blocks=100)
    loop.add(endless("a", prompt_of(9), max_tokens=2))
    follower = loop.add(endless("b", prompt_of(9), leader="a", max_tokens=2), held=True)
    loop.run()
    assert loop.scheduler.num_unfinished == 1
    loop.scheduler.unhold("b")
    loop.run()
    assert len(follower.tokens) == 2


def test_a_request_that_names_itself_as_leader_runs() -> None:
    loop = SchedulerLoop(num_blocks=100)
    client = loop.add(endless("a", prompt_of(9), leader="a", max_tokens=2))
    loop.run()
    assert len(client.tokens) == 2


def test_nobody_follows_without_prefix_caching() -> None:
    loop = SchedulerLoop(num_blocks=100, enable_prefix_caching=False)
    loop.add(endless("a", prompt_of(9), max_tokens=2))
    loop.add(endless("b", prompt_of(9), leader="a", max_tokens=2))
    assert counts(loop.plan()) == [9, 9]


# -- prefix cache --------------------------------------------------------------------------------------------


def test_a_prompt_jumps_over_what_another_has_computed_meanwhile() -> None:
    """Skip-ahead: "b" is admitted while "a" is in the midst of the same prompt, and gets on more slowly."""
    loop = SchedulerLoop(num_blocks=200, max_tokens_per_step=20, prefill_chunk=16)
    first = loop.add(endless("a", prompt_of(160), max_tokens=4))
    loop.step()
    loop.step()
    second = loop.add(endless("b", prompt_of(160), max_tokens=4, seed=1))
    loop.run()
    skips = [step.skip for plan in loop.plans for step in plan.steps]
    assert sum(skips) == loop.runner.tokens_skipped > 0
    assert loop.runner.tokens_computed + loop.runner.tokens_skipped == 160 + 160 - 32 + 3 + 3
    assert first.deltas[-1].num_cached_tokens == 0
    assert second.deltas[-1].num_cached_tokens == 32 + loop.runner.tokens_skipped
    load = loop.scheduler.load()
    assert load.prefix_hits == second.deltas[-1].num_cached_tokens
    loop.check_idle()


def test_prompt_logprobs_are_computed_not_taken_from_the_cache() -> None:
    loop = SchedulerLoop(num_blocks=200, max_tokens_per_step=16)
    for name in ("a", "b"):
        client = loop.add(endless(name, prompt_of(40), max_tokens=2, prompt_logprobs=0))
        loop.run()
        assert client.deltas[-1].num_cached_tokens == 0
        assert client.prompt_logprobs is not None
        assert len(client.prompt_logprobs) == 40
    assert loop.runner.tokens_computed == 2 * 41


def test_tenants_do_not_share() -> None:
    loop = SchedulerLoop(num_blocks=200)
    for name, salt, adapter in (("a", "", ""), ("b", "x", ""), ("c", "", "x"), ("d", "x", "")):
        loop.add(endless(name, prompt_of(20), max_tokens=2, cache_salt=salt, adapter=adapter))
        loop.run()
    assert [loop.clients[name].deltas[-1].num_cached_tokens for name in "abcd"] == [0, 0, 0, 16]


@pytest.mark.parametrize("first", [1, 20])
def test_a_blocked_request_is_not_matched_again_every_step(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not its prompt starts like what runs."""
    loop = SchedulerLoop(num_blocks=20, max_tokens_per_step=64)
    loop.add(endless("a", prompt_of(40), max_tokens=30))
    loop.step()
    loop.add(endless("b", prompt_of(79, first), max_tokens=1))
    tries: list[int] = []
    match = loop.kv.match

    def counted(holding: Holding, tokens: array[int], limit: int) -> int:
        tries.append(limit)
        return match(holding, tokens, limit)

    monkeypatch.setattr(loop.kv, "match", counted)
    for _ in range(28):
        loop.step()
    assert loop.scheduler.load().waiting == 1
    assert len(tries) <= 2
    loop.run()
    assert len(tries) <= 4
    loop.check_idle()


# -- preemption and order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_out_of_blocks_the_last_is_recomputed_and_nothing_is_lost(depth: int, caching: bool) -> None:
    loop = SchedulerLoop(num_blocks=16, depth=depth, enable_prefix_caching=caching)
    clients = [loop.add(endless(f"r{i}", prompt_of(9, i), max_tokens=40, seed=i)) for i in range(6)]
    loop.run()
    assert loop.scheduler.num_preemptions > 3
    for client in clients:
        assert client.tokens == reference_output(client.request, vocab_size=48, eos=0, length=10_000)[0]
    assert loop.ended[0] == "r0"
    loop.check_idle()


def test_prompt_logprobs_survive_a_preemption_amid_the_prompt() -> None:
    loop = SchedulerLoop(num_blocks=24, prefill_chunk=2, key=QUEUE_KEYS["priority"])
    low = loop.add(endless("low", prompt_of(44), max_tokens=3, priority=9, prompt_logprobs=0))
    loop.step()
    for number in range(7):
        loop.add(endless(f"r{number}", prompt_of(2, 3 * number), max_tokens=30, seed=number))
    while loop.scheduler.num_preemptions == 0:
        assert loop.step()
    assert not low.deltas
    loop.run()
    assert [entry and entry.token_id for entry in low.prompt_logprobs or ()] == [None, *prompt_of(44)[1:]]
    loop.check_idle()


def test_priority_goes_first_and_arrival_decides_among_equals() -> None:
    loop = SchedulerLoop(num_blocks=100, max_num_seqs=1, key=QUEUE_KEYS["priority"])
    for name, priority in (("a", 5), ("b", 1), ("c", -3), ("d", 1)):
        loop.add(endless(name, prompt_of(5), max_tokens=2, priority=priority))
    loop.run()
    assert [new.request_id for plan in loop.plans for new in plan.new] == ["c", "b", "d", "a"]
    first_come = SchedulerLoop(num_blocks=100, max_num_seqs=1, key=QUEUE_KEYS["fcfs"])
    for name, priority in (("a", 5), ("b", 1), ("c", -3)):
        first_come.add(endless(name, prompt_of(5), max_tokens=2, priority=priority))
    first_come.run()
    assert [new.request_id for plan in first_come.plans for new in plan.new] == ["a", "b", "c"]


def test_a_request_with_priority_preempts_later_ones_when_blocks_run_out() -> None:
    loop = SchedulerLoop(num_blocks=12, key=QUEUE_KEYS["priority"])
    low = loop.add(endless("low", prompt_of(8), max_tokens=30, priority=9))
    loop.step()
    high = loop.add(endless("high", prompt_of(8, 20), max_tokens=30))
    loop.run()
    assert loop.ended == ["high", "low"]
    assert loop.scheduler.num_preemptions >= 1
    assert (len(low.tokens), len(high.tokens)) == (30, 30)


def test_the_first_in_the_queue_does_not_starve_while_later_ones_come_and_go() -> None:
    """At depth 2 something given up is always fenced when a request ends each step; the first must get on all the same.
    SchedulerLoop checks that after every commit."""
    loop = SchedulerLoop(num_blocks=30, depth=2, max_tokens_per_step=48, prefill_chunk=32, max_num_seqs=12)
    long = loop.add(endless("long", prompt_of(100), max_tokens=4))
    for number in range(300):
        loop.add(make_request(f"r{number}", prompt_of(2 + number % 3, number % 7), max_tokens=6, seed=number))
        loop.step()
        if not long.open:
            break
    assert long.last is not None
    assert loop.commits < 40
    loop.run()
    loop.check_idle()


def test_later_prompts_are_not_admitted_into_blocks_that_earlier_ones_still_need() -> None:
    """Two long prompts in small chunks, room for one: the second waits instead of being preempted halfway."""
    loop = SchedulerLoop(num_blocks=30, max_tokens_per_step=32, prefill_chunk=8)
    loop.add(endless("a", prompt_of(80), max_tokens=4))
    loop.add(endless("b", prompt_of(80, 20), max_tokens=4))
    loop.run()
    assert loop.scheduler.num_preemptions == 0
    assert loop.runner.tokens_computed == 2 * 83
