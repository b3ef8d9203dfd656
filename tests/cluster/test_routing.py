from __future__ import annotations

import itertools
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.scripted_instance import make_request

from kllm.cluster.routers import ROUTERS
from kllm.cluster.routing import Candidate, LeastLoaded, RoundRobin, Router

REQUEST = make_request()


def candidates(assigned: dict[int, int]) -> list[Candidate]:
    return [Candidate(index=index, assigned=count) for index, count in sorted(assigned.items())]


sets = st.dictionaries(st.integers(0, 7), st.integers(0, 5), min_size=1).map(candidates)


@pytest.mark.parametrize("name", ROUTERS)
@given(history=st.lists(sets, max_size=20), seed=st.integers(0, 9))
def test_every_router_takes_a_candidate_repeatably(name: str, history: list[list[Candidate]], seed: int) -> None:
    first, second = (ROUTERS[name](random.Random(seed)) for _ in range(2))
    chosen = [first.choose(REQUEST, each) for each in history]
    assert chosen == [second.choose(REQUEST, each) for each in history]
    assert all(index in {c.index for c in each} for index, each in zip(chosen, history, strict=True))


def test_round_robin_takes_turns_whatever_the_load() -> None:
    router = RoundRobin()
    for turn in range(12):
        assert router.choose(REQUEST, candidates({0: 9, 1: 0, 2: 5})) == turn % 3


def test_round_robin_passes_over_those_that_are_away() -> None:
    """Exhaustive: after every choice, from every subset, the next index in the circle is chosen."""
    subsets = [set(c) for size in range(1, 5) for c in itertools.combinations(range(4), size)]
    for last, subset in itertools.product(range(4), subsets):
        router = RoundRobin()
        router.choose(REQUEST, candidates({last: 0}))
        circle = [(last + step) % 4 for step in range(1, 5)]
        expected = next(index for index in circle if index in subset)
        assert router.choose(REQUEST, candidates(dict.fromkeys(subset, 0))) == expected


@given(assigned=st.dictionaries(st.integers(0, 7), st.integers(0, 5), min_size=1))
def test_least_loaded_takes_one_of_the_least(assigned: dict[int, int]) -> None:
    chosen = LeastLoaded(random.Random(0)).choose(REQUEST, candidates(assigned))
    assert assigned[chosen] == min(assigned.values())


def test_ties_are_drawn_evenly() -> None:
    router: Router = LeastLoaded(random.Random(0))
    counts = Counter(router.choose(REQUEST, candidates({0: 1, 1: 1, 2: 1, 3: 2})) for _ in range(3000))
    assert set(counts) == {0, 1, 2}
    assert all(900 < count < 1100 for count in counts.values())


def test_counting_its_own_choices_balances() -> None:
    router = LeastLoaded(random.Random(0))
    assigned = dict.fromkeys(range(5), 0)
    for _ in range(1000):
        assigned[router.choose(REQUEST, candidates(assigned))] += 1
    assert set(assigned.values()) == {200}
