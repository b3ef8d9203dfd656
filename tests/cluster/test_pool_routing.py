"""Pool policies: whom each prefers, and what holds for all of them whatever the candidates are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_instance import make_request

from kllm.cluster.pool_prediction import Times
from kllm.cluster.pool_routing import GlobalPools, PoolPolicy, PoolSettings
from kllm.cluster.pool_variants import (
    POOL_POLICIES,
    FixedGroups,
    GroupsInTurn,
    SeparateAlways,
    even_groups,
    pool_policy,
)
from kllm.cluster.routing import Candidate
from kllm.messages import EngineLoad, StepTimes
from kllm.request import Request

TIMES = StepTimes(base=0.01, row=2e-4, new_token=5e-5, context_token=1e-8, samples=100)
CAPACITY = {"num_blocks": 4000, "block_tokens": 16, "max_num_seqs": 128, "chunk_tokens": 2048, "page_bytes": 800_000}
LOAD_FIELDS = {"decoding", "context", "lacking", "kv_usage", "step_times", "steps", "role"}


def candidate(index: int, **fields: Any) -> Candidate:
    load = {"step_times": TIMES} | {name: value for name, value in fields.items() if name in LOAD_FIELDS}
    rest = {name: value for name, value in fields.items() if name not in LOAD_FIELDS}
    return Candidate(index=index, load=EngineLoad(**load), **({"assigned": 0} | CAPACITY | rest))


def candidates(*each: dict[str, Any], first: int = 0) -> list[Candidate]:
    return [candidate(first + place, **fields) for place, fields in enumerate(each)]


def request(tokens: int = 1600, max_tokens: int = 100) -> Request:
    return make_request(prompt=[7] * tokens, max_tokens=max_tokens)


def everyone(rng: random.Random) -> dict[str, PoolPolicy]:
    made: dict[str, PoolPolicy] = {name: make(rng, PoolSettings()) for name, make in POOL_POLICIES.items()}
    made["groups"] = FixedGroups([[0, 4], [1, 5], [2, 6], [3, 7]], rng)
    return made | {"in-turn": GroupsInTurn([[0, 4], [1, 5], [2, 6], [3, 7]], rng)}


EVERYONE = list(everyone(random.Random(0)))

# -- the choice of P ------------------------------------------------------------------------------------------


def arrive(policy: PoolPolicy, prefill: list[Candidate], decode: list[Candidate], **kind: int) -> Any:
    return policy.arrive(request(**kind), 0, prefill, decode)


def test_p_is_the_one_that_begins_first() -> None:
    policy = SeparateAlways()
    idle_d = candidates({"assigned": 120, "decoding": 120, "holding": 50_000}, first=4)
    choice = arrive(policy, candidates({"prefilling": 900}, {}, {"prefilling": 4000}), idle_d)
    assert (choice.index, choice.separate) == (1, True)
    matched = {"prefilling": 1000, "l1": 1500, "l2": 1500, "l3": 1500}
    assert arrive(policy, candidates({}, matched), idle_d).index == 1
    assert [index for index, _ in choice.scores] == [0, 1, 2]


def test_a_hot_prefix_spreads_when_its_holder_is_loaded() -> None:
    decode = candidates({"assigned": 120, "decoding": 120}, first=4)
    holder = {"l1": 1500, "l2": 1500, "l3": 1500, "prefilling": 2500}
    assert arrive(SeparateAlways(), candidates({}, holder), decode).index == 0


def test_nearer_tiers_are_better() -> None:
    l1, l2, l3 = {"l1": 1500, "l2": 1500, "l3": 1500}, {"l2": 1500, "l3": 1500}, {"l3": 1500}
    decode = candidates({"assigned": 120, "decoding": 120}, first=4)
    assert arrive(SeparateAlways(), candidates({}, l3, l2, l1), decode).index == 3
    assert arrive(SeparateAlways(), candidates({}, l3, l2), decode).index == 2


def test_a_slower_p_is_weighed_by_its_own_steps() -> None:
    slow = msgspec.structs.replace(TIMES, new_token=5e-4)
    decode = candidates({"assigned": 120, "decoding": 120}, first=4)
    assert arrive(SeparateAlways(), candidates({"step_times": slow}, {"prefilling": 8000}), decode).index == 1


def test_an_instance_without_steps_is_taken_to_be_as_the_others() -> None:
    new = {"step_times": None}
    decode = candidates({"assigned": 120, "decoding": 120}, first=4)
    assert arrive(SeparateAlways(), candidates({"prefilling": 1000}, new), decode).index == 1
    assert arrive(SeparateAlways(), candidates(new | {"prefilling": 1000}, new), decode).index == 1


def test_of_what_an_instance_does_not_do_its_fit_says_nothing() -> None:
    p = candidate(0, role="prefill", step_times=msgspec.structs.replace(TIMES, base=0.2, row=0.0))
    d = candidate(1, role="decode", step_times=msgspec.structs.replace(TIMES, new_token=1e-3))
    times = Times([p, d])
    assert times.of(p).base == 0.2
    assert times.decoding(p).base == TIMES.base
    assert times.of(d).new_token == times.decoding(p).new_token == TIMES.new_token + 0.2 / 2048


def test_steps_that_are_all_full_make_no_prompt_free() -> None:
    """Their fit has all of it as base, and tokens that cost nothing."""
    full_steps = msgspec.structs.replace(TIMES, base=0.1, new_token=0.0)
    prefill = candidates({"role": "prefill", "step_times": full_steps, "prefilling": 120_000}, {"prefilling": 90_000})
    decode = candidates({"role": "decode", "assigned": 60}, first=2)
    assert arrive(SeparateAlways(), prefill, decode, tokens=16_000).index == 1


def test_a_report_says_how_far_a_long_prompt_is() -> None:
    half_done = {"prefilling": 100_000, "lacking": 10_000, "unreported": 0}
    decode = candidates({"assigned": 120, "decoding": 120}, first=4)
    assert arrive(SeparateAlways(), candidates(half_done, {"prefilling": 20_000}), decode).index == 0
    not_seen = half_done | {"unreported": 30_000}
    assert arrive(SeparateAlways(), candidates(not_seen, {"prefilling": 20_000}), decode).index == 1


# -- the choice of D ------------------------------------------------------------------------------------------


def handed_over(policy: PoolPolicy, *decode: dict[str, Any], source: int = 99, **kind: int) -> int:
    return policy.handed_over(request(**kind), 1, source, candidates(*decode)).index


def test_d_is_the_one_with_the_shortest_steps() -> None:
    busy = {"assigned": 40, "decoding": 40, "holding": 20_000}
    assert handed_over(GlobalPools(), busy, {"assigned": 10, "decoding": 10, "holding": 5000}, busy) == 1


def test_what_was_just_sent_there_counts_before_any_report() -> None:
    assert handed_over(GlobalPools(), {"assigned": 3, "holding": 5000}, {"assigned": 1, "foreign": 1}) == 1


def test_kv_that_is_there_is_worth_some_load_and_not_any() -> None:
    there = {"l1": 16_000, "l2": 16_000, "l3": 16_000}
    policy = GlobalPools()
    assert handed_over(policy, {"assigned": 10}, {"assigned": 11} | there, tokens=16_000) == 1
    assert handed_over(policy, {"assigned": 10}, {"assigned": 60} | there, tokens=16_000) == 0
    load_only = POOL_POLICIES["load-only"](random.Random(0), PoolSettings())
    assert handed_over(load_only, {"assigned": 10}, {"assigned": 11} | there, tokens=16_000) == 0


def test_what_is_already_on_its_way_delays_the_next() -> None:
    assert handed_over(GlobalPools(), {"assigned": 5, "pulling": 200_000}, {"assigned": 6}) == 1


def test_whoever_prefilled_it_has_the_kv() -> None:
    assert handed_over(GlobalPools(), {"assigned": 10}, {"assigned": 11}, source=1, tokens=16_000) == 1


def test_a_full_d_is_avoided() -> None:
    full = {"kv_usage": 0.89}
    assert handed_over(GlobalPools(), full, {"assigned": 60, "decoding": 60}) == 1
    no_place = {"assigned": 128, "max_num_seqs": 128}
    assert handed_over(GlobalPools(), no_place, {"assigned": 120, "max_num_seqs": 200}) == 1
    assert handed_over(GlobalPools(), {"kv_usage": 0.99}, {"kv_usage": 0.95}, {"kv_usage": 0.97}) == 1


def test_one_beyond_the_slo_is_avoided() -> None:
    settings = PoolSettings(tpot_slo_s=0.02)
    late = {"assigned": 60, "l1": 1600, "l2": 1600, "l3": 1600}
    slow = msgspec.structs.replace(TIMES, row=1e-3)
    policy = GlobalPools(settings=settings)
    assert handed_over(policy, late | {"step_times": slow}, {"assigned": 45}) == 1
    choice = policy.handed_over(request(), 1, 9, candidates({"assigned": 70}, {"assigned": 90}))
    assert choice.index == 0
    assert "beyond the SLO" in choice.reason


# -- conditional separation -----------------------------------------------------------------------------------


def test_a_short_prompt_stays_on_a_d_where_that_is_quicker() -> None:
    busy_p = candidates({"prefilling": 30_000}, {"prefilling": 30_000})
    idle_d = candidates({"assigned": 5, "decoding": 5}, first=2)
    choice = arrive(GlobalPools(), busy_p, idle_d, tokens=400)
    assert (choice.index, choice.separate) == (2, False)
    assert arrive(
        POOL_POLICIES["separate-always"](random.Random(0), PoolSettings()), busy_p, idle_d, tokens=400
    ).separate


def test_a_long_prompt_stays_if_the_d_has_most_of_it() -> None:
    busy_p = candidates({"prefilling": 30_000})
    has_it = candidates({"assigned": 5, "l1": 15_600, "l2": 15_600, "l3": 15_600}, first=1)
    assert not arrive(GlobalPools(), busy_p, has_it, tokens=16_000).separate
    lacks_it = candidates({"assigned": 60}, first=1)
    assert arrive(GlobalPools(), busy_p, lacks_it, tokens=60_000).separate


def test_it_does_not_stay_where_steps_would_miss_the_slo() -> None:
    busy_p = candidates({"prefilling": 30_000})
    full_step = candidates({"assigned": 200, "max_num_seqs": 256, "prefilling": 14_000}, first=1)
    assert arrive(GlobalPools(), busy_p, full_step, tokens=400).separate
    assert not arrive(GlobalPools(settings=PoolSettings(tpot_slo_s=1.0)), busy_p, full_step, tokens=400).separate


def test_a_long_prompt_stays_now_and_then_where_a_d_has_little_to_do() -> None:
    policy = GlobalPools()
    busy_p = candidates({"prefilling": 60_000})

    def stays(steps: int) -> bool:
        decode = candidates({"assigned": 2, "decoding": 2, "steps": steps}, first=1)
        return not arrive(policy, busy_p, decode, tokens=16_000).separate

    assert stays(1000)  # 0.8 s, of 48 steps that are about 40 ms below the SLO
    assert stays(1000)
    assert not stays(1000)
    assert not stays(1008)
    assert stays(1020)
    assert stays(10)  # a new process


def test_an_idle_d_takes_a_long_prompt_and_no_queue_of_them() -> None:
    busy_p = candidates({"prefilling": 200_000})
    assert not arrive(GlobalPools(), busy_p, candidates({}, first=1), tokens=16_000).separate
    assert arrive(GlobalPools(), busy_p, candidates({"prefilling": 60_000}, first=1), tokens=16_000).separate


def test_a_request_stays_on_p_where_no_d_is_quick_enough() -> None:
    slow = msgspec.structs.replace(TIMES, row=1e-3)
    busy_d = candidates({"assigned": 60, "step_times": slow}, first=1)
    idle_p = candidates({"step_times": slow})
    choice = arrive(GlobalPools(), idle_p, busy_d, tokens=400)
    assert (choice.index, choice.separate) == (0, False)
    assert arrive(GlobalPools(), candidates({"prefilling": 100_000, "step_times": slow}), busy_d).separate
    quick_d = candidates({"assigned": 35, "step_times": slow}, first=1)
    assert arrive(GlobalPools(), idle_p, quick_d, tokens=400).separate


def test_it_does_not_stay_where_p_is_quicker() -> None:
    choice = arrive(GlobalPools(), candidates({}), candidates({"assigned": 60, "prefilling": 400}, first=1), tokens=400)
    assert (choice.index, choice.separate) == (0, True)


# -- variants -------------------------------------------------------------------------------------------------


def test_groups_hand_over_within() -> None:
    policy = FixedGroups(even_groups(2, 4, 2))
    loaded = candidates({"assigned": 90}, {"assigned": 90}, {}, {}, first=2)
    assert policy.handed_over(request(), 1, 0, loaded).index in (2, 3)
    assert policy.handed_over(request(), 1, 1, loaded).index in (4, 5)
    assert policy.handed_over(request(), 1, 0, loaded[2:]).index in (4, 5)  # its own are gone


def test_groups_weigh_their_d_too() -> None:
    policy = FixedGroups(even_groups(2, 2, 2))
    prefill, decode = candidates({}, {"prefilling": 500}), candidates({"assigned": 90}, {"assigned": 1}, first=2)
    assert arrive(policy, prefill, decode).index == 1
    full = candidates({"kv_usage": 0.95}, {"assigned": 100}, first=2)
    assert arrive(policy, prefill, full).index == 1


def test_groups_in_turn() -> None:
    policy = GroupsInTurn(even_groups(4, 4, 2))
    prefill, decode = candidates({}, {}, {}, {}), candidates({}, {}, {}, {}, first=4)
    assert [arrive(policy, prefill, decode).index // 2 for _ in range(4)] == [0, 1, 0, 1]


def test_what_is_chosen_together_stays_chosen() -> None:
    policy = POOL_POLICIES["chosen-together"](random.Random(0), PoolSettings())
    arriving = request()
    policy.arrive(arriving, 0, candidates({}), candidates({"assigned": 9}, {}, {"assigned": 9}, first=1))
    later = candidates({}, {"assigned": 50}, {}, first=1)
    assert policy.handed_over(arriving, 1, 0, later).index == 2
    assert policy.handed_over(arriving, 1, 0, later).index != 2  # another attempt of it: chosen anew


@pytest.mark.parametrize(("prefill", "decode", "groups"), [(4, 3, 2), (4, 4, 3), (0, 4, 1), (4, 4, 0)])
def test_uneven_groups_are_refused(prefill: int, decode: int, groups: int) -> None:
    with pytest.raises(ValueError, match="equal groups"):
        even_groups(prefill, decode, groups)


def test_every_policy_has_a_name() -> None:
    assert isinstance(pool_policy("global", 2, 2, PoolSettings(), random.Random(0)), GlobalPools)
    assert isinstance(pool_policy("groups:2", 2, 4, PoolSettings(), random.Random(0)), FixedGroups)
    assert isinstance(pool_policy("groups-in-turn:2", 2, 4, PoolSettings(), random.Random(0)), GroupsInTurn)
    for name in ("nearest", "groups", "groups:x", "global:2", "groups:3"):
        with pytest.raises(ValueError):
            pool_policy(name, 2, 4, PoolSettings(), random.Random(0))


# -- what holds for all ---------------------------------------------------------------------------------------

counts = st.integers(0, 200)
tokens = st.integers(0, 60_000)


@st.composite
def instances(draw: st.DrawFn, first: int, least: int, most: int) -> list[Candidate]:
    made = []
    for index in sorted(draw(st.sets(st.integers(first, first + 3), min_size=least, max_size=most))):
        below = sorted(draw(st.lists(st.integers(0, 1600), min_size=3, max_size=3)))
        token_only = StepTimes(new_token=1e-4, samples=1)
        fitted = draw(
            st.sampled_from((TIMES, None, msgspec.structs.replace(TIMES, new_token=2e-4, row=0.0), token_only))
        )
        made.append(
            candidate(
                index,
                assigned=draw(counts),
                prefills=draw(st.integers(0, 3)),
                prefilling=draw(tokens),
                holding=draw(tokens),
                pulling=draw(tokens),
                unreported=draw(st.none() | tokens),
                decoding=draw(counts),
                context=draw(tokens),
                lacking=draw(tokens),
                kv_usage=draw(st.floats(0, 1)),
                step_times=fitted,
                **dict(zip(("l1", "l2", "l3"), below, strict=True)),
            )
        )
    return made


fleets = st.tuples(instances(0, 1, 4), instances(4, 0, 4), st.sampled_from(("apart", "both")))


def pools(fleet: Any) -> tuple[list[Candidate], list[Candidate]]:
    """Disjoint, or with the P's in both."""
    prefill, decode, kind = fleet
    return (prefill, decode) if kind == "apart" else (prefill, [*prefill, *decode])


@pytest.mark.parametrize("name", EVERYONE)
@settings(max_examples=25, deadline=None)
@given(fleet=fleets, seed=st.integers(0, 3), prompt=st.integers(1, 5000))
def test_choices_are_among_the_candidates_and_repeatable(name: str, fleet: Any, seed: int, prompt: int) -> None:
    prefill, decode = pools(fleet)
    arriving = request(tokens=prompt)
    made = []
    for _ in range(2):
        policy = everyone(random.Random(seed))[name]
        first = policy.arrive(arriving, 0, prefill, decode)
        assert first.index in {c.index for c in (*prefill, *decode)}
        keeps = {c.index for c in decode}
        assert not first.separate or (decode and first.index not in keeps)
        made.append([first])
        if decode:
            second = policy.handed_over(arriving, 1, prefill[0].index, decode)
            assert second.index in keeps
            assert not second.separate
            made[-1].append(second)
    assert made[0] == made[1]


@pytest.mark.parametrize("name", [name for name in EVERYONE if name not in ("in-turn", "random-decode")])
def test_equals_are_drawn(name: str) -> None:
    policy = everyone(random.Random(0))[name]
    prefill, decode = candidates({}, {}, {}, {}), candidates({}, {}, {}, {}, first=4)
    arriving = [policy.arrive(request(tokens=8000), 0, prefill, decode) for _ in range(200)]
    assert Counter(choice.index for choice in arriving).keys() == {0, 1, 2, 3}
    handed = [policy.handed_over(make_request(f"r{i}", prompt=[7] * 80), 1, i % 4, decode).index for i in range(200)]
    assert Counter(handed).keys() == {4, 5, 6, 7}


WORSE: list[Callable[[Candidate], Candidate]] = [
    lambda c: msgspec.structs.replace(c, assigned=c.assigned + 5, holding=c.holding + 3000),
    lambda c: msgspec.structs.replace(c, prefilling=c.prefilling + 3000, unreported=None),
    lambda c: msgspec.structs.replace(c, pulling=c.pulling + 3000),
    lambda c: msgspec.structs.replace(c, l1=0, l2=0, l3=0),
    lambda c: msgspec.structs.replace(c, load=msgspec.structs.replace(c.load, kv_usage=1.0)),
    lambda c: msgspec.structs.replace(c, foreign=c.foreign + 50),
]


@given(fleet=fleets, worse=st.sampled_from(WORSE), data=st.data())
def test_more_load_never_makes_one_chosen(fleet: Any, worse: Callable[[Candidate], Candidate], data: Any) -> None:
    """If one is not the best for D, it is not after it has become worse, the others being as they were."""
    decode = [*fleet[0], *fleet[1]]
    policy = GlobalPools()
    before = policy.handed_over(request(), 1, 99, decode)
    other = data.draw(st.sampled_from(decode))
    if other.index == before.index:
        return
    after = policy.handed_over(request(), 1, 99, [worse(c) if c is other else c for c in decode])
    ties = dict(before.scores)
    equal = ties.get(other.index) == ties[before.index]
    assert equal or after.index != other.index


@given(prefill=instances(0, 2, 4), worse=st.sampled_from(WORSE[:4]), data=st.data())
def test_more_load_never_lowers_the_time_to_first_token(prefill: Any, worse: Any, data: Any) -> None:
    other = data.draw(st.sampled_from(prefill))
    policy = GlobalPools(settings=PoolSettings(conditional=False))
    before = dict(arrive(policy, prefill, []).scores)
    after = dict(arrive(policy, [worse(c) if c is other else c for c in prefill], []).scores)
    assert after[other.index] >= before[other.index]
    assert all(after[index] == score for index, score in before.items() if index != other.index)
