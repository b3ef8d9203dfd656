"""Fair chunked prefill (F1): the reported example with exact rounds, sharing, and that nobody starves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.cache.manager import KVManager
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import RowResult, StepResult
from kllm.scheduling.prefill_policy import FairShare, FirstCome, PrefillPolicy
from kllm.scheduling.scheduler import Scheduler

CHUNK = 32
BLOCK = 4


@dataclass
class Rounds:
    """A scheduler whose steps are rounds: 1 is the first. finished: the round in which each prompt was computed."""

    policy: PrefillPolicy
    num_blocks: int = 4096
    max_num_seqs: int = 8
    decode_room: int = 0
    round: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    computed: dict[str, list[int]] = field(default_factory=dict)  # tokens of each round
    firsts: dict[str, int] = field(default_factory=dict)  # first token of each prompt
    names: dict[int, str] = field(default_factory=dict)  # by row

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            KVManager(self.num_blocks, BLOCK),
            max_model_len=100_000,
            max_num_seqs=self.max_num_seqs,
            max_tokens_per_step=CHUNK + self.decode_room,
            prefill_chunk=CHUNK,
            policy=self.policy,
        )

    def arrive(self, name: str, tokens: int, output: int = 1) -> None:
        first = self.firsts[name] = 1 + 1000 * len(self.firsts)  # prompts share nothing
        params = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
        prompt = list(range(first, first + tokens))
        request = Request(request_id=name, prompt_token_ids=prompt, params=params)
        assert self.scheduler.add(Submit(request=request), float(self.round)) is None

    def run(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            plan = self.scheduler.plan(float(self.round))
            if plan is None:
                return
            self.round += 1
            self.names |= {new.row: new.request_id for new in plan.new}
            for step in plan.steps:
                self.computed.setdefault(self.names[step.row], []).append(step.count)
            rows = {step.row: RowResult(7) for step in plan.steps if step.sample}
            for delta in self.scheduler.commit(StepResult(plan.id, rows), float(self.round)):
                self.finished.setdefault(delta.request_id, self.round)
            if self.round % 16 == 0:
                self.scheduler.check()

    def run_all(self, limit: int = 10_000) -> None:
        while self.scheduler.num_unfinished:
            assert self.round < limit, "somebody never ends"
            self.run()


def fair(growth: int = 1, kv_share: float = 0.5, num_blocks: int = 4096) -> FairShare:
    return FairShare(CHUNK, growth, num_blocks * BLOCK, kv_share)


def test_the_reported_example() -> None:
    """B has eleven chunks; C and D, half a chunk each, come while its first is computed. First come, first served lets
    them run after round 11. With fairness they finish in round 2, and B in round 12, computing nothing twice."""
    finished = {}
    for name, policy in (("fcfs", FirstCome()), ("fair", fair())):
        rounds = Rounds(policy)
        rounds.arrive("B", 11 * CHUNK)
        rounds.run()
        rounds.arrive("C", CHUNK // 2)
        rounds.arrive("D", CHUNK // 2)
        rounds.run_all()
        finished[name] = rounds.finished
        assert sum(rounds.computed["B"]) == 11 * CHUNK
    assert finished["fcfs"] == {"B": 11, "C": 12, "D": 12}
    assert finished["fair"] == {"C": 2, "D": 2, "B": 12}


def test_a_long_prompt_gets_more_often_a_turn_the_longer_it_has_given_way() -> None:
    """Short prompts fill every round. The long one's turns come closer together until it has all of its prompt."""
    rounds = Rounds(fair(growth=1), max_num_seqs=64)
    rounds.arrive("long", 20 * CHUNK)
    turns = []
    for number in range(200):
        rounds.arrive(f"short {number}", CHUNK)
        before = len(rounds.computed.get("long", []))
        rounds.run()
        if len(rounds.computed.get("long", [])) > before:
            turns.append(rounds.round)
        if "long" in rounds.finished:
            break
    gaps = [later - earlier for earlier, later in pairwise(turns)]
    assert len(turns) == 20
    assert turns[0] == 9, "1 + 2 + … + 7 < 32 <= 1 + 2 + … + 8"
    assert sum(gaps[:5]) > 1.5 * sum(gaps[-5:])
    assert rounds.finished["long"] <= bound(20 * CHUNK, growth=1)


@pytest.mark.parametrize("growth", [1, CHUNK])
def test_a_long_prompt_passes_nobody_who_came_before_it(growth: int) -> None:
    """Waiting for what came earlier earns nothing: nobody is served later than by first come, first served."""
    finished = {}
    for name, policy in (("fcfs", FirstCome()), ("fair", fair(growth))):
        rounds = Rounds(policy, max_num_seqs=64)
        for number in range(40):
            rounds.arrive(f"short {number}", CHUNK)
        rounds.arrive("long", 4 * CHUNK)
        rounds.run_all()
        finished[name] = rounds.finished
    assert finished["fair"] == finished["fcfs"]


def test_a_long_prompt_passes_those_that_made_it_give_way() -> None:
    rounds = Rounds(fair(growth=CHUNK), max_num_seqs=64)
    rounds.arrive("long", 3 * CHUNK)
    for number in range(10):
        rounds.arrive(f"short {number}", CHUNK)
    rounds.run(1)
    assert set(rounds.finished) == {"short 0"}
    rounds.run_all()
    assert rounds.finished["long"] <= 6, "a chunk is owed after round 1, two more after round 3"


def test_long_prompts_in_progress_share() -> None:
    """Three equal long prompts, nothing else: none of them waits for the others to end."""
    rounds = Rounds(fair(growth=4))
    for name in ("x", "y", "z"):
        rounds.arrive(name, 30 * CHUNK)
    rounds.run(60)
    progress = {name: sum(counts) for name, counts in rounds.computed.items()}
    assert min(progress.values()) > 10 * CHUNK
    rounds.run_all()
    assert rounds.round == 90, "nothing is computed twice and no round is wasted"


def test_the_first_long_prompt_leads_while_none_has_given_way_long() -> None:
    rounds = Rounds(fair(growth=1))
    rounds.arrive("x", 10 * CHUNK)
    rounds.arrive("y", 10 * CHUNK)
    rounds.run(8)
    assert set(rounds.computed) == {"x"}, "1 + 2 + … + 7 < 32 <= 1 + 2 + … + 8"
    rounds.run()
    assert set(rounds.computed) == {"x", "y"}
    rounds.run_all()
    assert rounds.finished["x"] < rounds.finished["y"] == 20


def test_quota_comes_from_the_kv_budget() -> None:
    """Long prompts that together exceed their share of the KV cache are not in progress together."""
    rounds = Rounds(fair(growth=8, kv_share=0.5, num_blocks=200), num_blocks=200)
    rounds.arrive("x", 10 * CHUNK)  # 320 of 800 tokens
    rounds.arrive("y", 10 * CHUNK)
    rounds.run(10)
    assert set(rounds.computed) == {"x"}
    rounds.arrive("short", 8)
    rounds.run()
    assert "short" in rounds.finished or "short" in rounds.computed
    rounds.run_all()


def test_a_prompt_that_is_mostly_cached_is_short() -> None:
    rounds = Rounds(fair())
    rounds.arrive("conversation", 10 * CHUNK)
    rounds.run_all()
    rounds.arrive("long", 10 * CHUNK)
    rounds.run()
    first = rounds.firsts["conversation"]
    prompt = [*range(first, first + 10 * CHUNK), *range(5, 5 + CHUNK // 2)]
    request = Request(request_id="next turn", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1, seed=0))
    rounds.scheduler.add(Submit(request=request), 0.0)
    rounds.run()
    assert rounds.finished["next turn"] == rounds.round


def bound(tokens: int, *, growth: int, earlier: Sequence[int] = (), short: int = 0, in_progress: int = 1) -> int:
    """Rounds after which a long prompt in progress is computed: the law in FairShare's docstring.

    earlier: tokens of the long ones that were in progress before it. short: tokens of the short ones that had come.
    in_progress: at once, at most."""
    computing = 2 * ceil(tokens / CHUNK)
    others = sum(2 * ceil(other / CHUNK) for other in earlier) + (in_progress - 1) * (computing + 1)
    yields = 0
    while growth * yields * (yields + 1) // 2 < tokens + (others + 1) * CHUNK:
        yields += 1
    return computing + 2 * ceil(short / CHUNK) + others + yields


prompts = st.one_of(st.integers(1, CHUNK), st.integers(CHUNK + 1, 12 * CHUNK))
arrivals = st.lists(st.tuples(st.integers(0, 3), prompts, st.integers(1, 6)), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(arrivals, st.integers(1, 16), st.integers(1, 8))
def test_every_request_ends_and_nothing_is_computed_twice(
    load: list[tuple[int, int, int]], growth: int, max_num_seqs: int
) -> None:
    """load: (rounds after the one before, prompt, output)."""
    rounds = Rounds(fair(growth=growth), max_num_seqs=max_num_seqs, decode_room=max_num_seqs)
    for number, (gap, tokens, output) in enumerate(load):
        rounds.run(gap)
        rounds.arrive(f"r{number}", tokens, output)
    rounds.run_all()
    assert set(rounds.finished) == {f"r{number}" for number in range(len(load))}
    total = sum(tokens for _, tokens, _ in load)
    computed = sum(sum(counts) for counts in rounds.computed.values())
    assert computed == total + sum(output - 1 for _, _, output in load), "nothing is computed twice"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 30),
    st.integers(1, 16),
    st.lists(st.lists(st.integers(1, CHUNK), max_size=3), min_size=400, max_size=400),
)
def test_a_long_prompt_is_computed_within_the_bound_whatever_short_ones_come(
    chunks: int, growth: int, short: list[list[int]]
) -> None:
    rounds = Rounds(fair(growth=growth), max_num_seqs=1300, num_blocks=20_000)
    rounds.arrive("long", chunks * CHUNK)
    limit = bound(chunks * CHUNK, growth=growth)
    for number, lengths in enumerate(short[:limit]):
        for place, tokens in enumerate(lengths):
            rounds.arrive(f"{number}/{place}", tokens)
        rounds.run()
        if "long" in rounds.finished:
            break
    rounds.run(max(0, limit - rounds.round))
    assert rounds.finished["long"] <= limit


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(2, 12)), min_size=2, max_size=5),
    st.integers(1, 16),
    st.booleans(),
)
def test_long_prompts_in_progress_end_within_the_bound(load: list[tuple[int, int]], growth: int, crowded: bool) -> None:
    """load: (rounds after the one before, chunks). crowded: a short prompt of a chunk comes in every round."""
    rounds = Rounds(fair(growth=growth, kv_share=1.0), max_num_seqs=600, num_blocks=20_000)
    limits: list[int] = []

    def run(count: int) -> None:
        for _ in range(count):
            if crowded:
                rounds.arrive(f"short {rounds.round}", CHUNK)
            rounds.run()

    for number, (gap, chunks) in enumerate(load):
        run(gap)
        earlier = [before * CHUNK for _, before in load[:number]]
        rounds.arrive(f"long {number}", chunks * CHUNK)
        short = CHUNK * sum(name.startswith("short") and name not in rounds.finished for name in rounds.firsts)
        allowed = bound(chunks * CHUNK, growth=growth, earlier=earlier, short=short, in_progress=len(load))
        limits.append(rounds.round + allowed)
    while rounds.round < max(limits) and (crowded or rounds.scheduler.num_unfinished):
        run(1)
    for number, limit in enumerate(limits):
        assert rounds.finished[f"long {number}"] <= limit


@pytest.mark.parametrize("growth", [1, 4])
def test_first_come_first_served_is_as_it_was(growth: int) -> None:
    rounds = Rounds(FirstCome())
    rounds.arrive("x", 3 * CHUNK)
    rounds.arrive("y", CHUNK)
    rounds.run_all()
    assert rounds.finished == {"x": 3, "y": 4}
