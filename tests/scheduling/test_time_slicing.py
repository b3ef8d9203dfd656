"""Time-sliced separation (E2): every request's TPOT stays below the target, tokens come at the pace of steps that only
decode, nobody starves, and what is generated does not change."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.cache.manager import KVManager
from kllm.config import EngineConfig
from kllm.engine.assembly import make_scheduler
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import Plan, RowResult, StepResult
from kllm.scheduling.prefill_policy import FairShare, FirstCome, PrefillPolicy
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.time_slicing import LEAST_SHARE, TimeSlicing

BLOCK = 4
STEP_TOKENS = 64
STEP_S, ROW_S, TOKEN_S = 0.010, 0.0005, 0.001  # of a step, each row that decodes, each token of a prompt


@dataclass
class Client:
    arrived: float
    tokens: list[float] = field(default_factory=list)  # when each came
    values: list[int] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.tokens)]


class Instance:
    """A scheduler whose steps take a time that is linear in what they compute. check_every: steps between checks of
    its invariants."""

    def __init__(
        self,
        slicing: TimeSlicing | None,
        *,
        policy: PrefillPolicy | None = None,
        num_blocks: int = 1024,
        max_num_seqs: int = 16,
        depth: int = 1,
        prefill_chunk: int | None = None,
        noise: float = 0.0,
        check_every: int = 1,
    ) -> None:
        self.slicing = slicing
        self.scheduler = Scheduler(
            KVManager(num_blocks, BLOCK),
            max_model_len=10_000,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=STEP_TOKENS,
            prefill_chunk=prefill_chunk,
            policy=policy or FirstCome(),
            max_overtakes=4,
            slicing=slicing,
        )
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.steps = 0
        self._depth = depth
        self._rng = random.Random(0)
        self._noise = noise
        self._check_every = check_every
        self._free_at = 0.0
        self._in_flight: list[tuple[Plan, float]] = []
        self._names: dict[int, str] = {}

    def arrive(self, name: str, prompt: int, output: int, *, shared: int = 0) -> None:
        own = 1 + 1000 * len(self.clients)
        tokens = [*range(9_000_000, 9_000_000 + shared), *range(own, own + prompt - shared)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
        self.clients[name] = Client(self.now)
        request = Request(request_id=name, prompt_token_ids=tokens, params=params)
        assert self.scheduler.add(Submit(request=request), self.now) is None

    def step(self) -> bool:
        """Fill the pipeline and commit a plan. False when there is nothing to do."""
        while len(self._in_flight) < self._depth and (plan := self.scheduler.plan(self.now)) is not None:
            self._check()
            assert 0 < plan.num_tokens <= STEP_TOKENS
            assert all(step.count > 0 for step in plan.steps)
            self._names |= {new.row: new.request_id for new in plan.new}
            self._free_at = max(self.now, self._free_at) + self._seconds(plan)
            self._in_flight.append((plan, self._free_at))
        if not self._in_flight:
            return False
        plan, self.now = self._in_flight.pop(0)
        rows = {step.row: RowResult(7) for step in plan.steps if step.sample}
        for delta in self.scheduler.commit(StepResult(plan.id, rows), self.now):
            self.clients[delta.request_id].tokens += [self.now] * len(delta.token_ids)
        self.steps += 1
        self._check()
        return True

    def _check(self) -> None:
        if self.steps % self._check_every == 0:
            self.scheduler.check()

    def _seconds(self, plan: Plan) -> float:
        single = sum(step.count == 1 for step in plan.steps)
        seconds = STEP_S + ROW_S * single + TOKEN_S * (plan.num_tokens - single)
        return seconds * self._rng.uniform(1 - self._noise, 1 + self._noise)

    def run_all(self, limit: int = 50_000) -> None:
        while self.step():
            assert self.steps < limit, "somebody never ends"
        assert self.scheduler.num_unfinished == 0


def decode_s(rows: int) -> float:
    return STEP_S + ROW_S * rows


def busy(instance: Instance, *, seconds: float, rate: float, output: int, seed: int = 0) -> None:
    """Poisson arrivals of prompts of 8 to 120 tokens."""
    rng = random.Random(seed)
    due = 0.0
    while due < seconds or instance.step():
        while due < seconds and (due <= instance.now or not instance.scheduler.num_unfinished):
            instance.now = max(instance.now, due)
            instance.arrive(f"r{len(instance.clients)}", rng.randint(8, 120), rng.randint(output // 2, output))
            due += rng.expovariate(rate)
        if due < seconds:
            instance.step()


def test_decoding_requests_get_their_tokens_undisturbed_between_slices() -> None:
    """A long prompt comes while another request decodes: that one has a single pause in `every` tokens."""
    instance = Instance(TimeSlicing(0.025, 32, STEP_TOKENS))
    instance.arrive("chat", 16, 200)
    for _ in range(50):
        instance.step()
    instance.arrive("long", 1000, 4)
    instance.run_all()
    pauses = [place for place, gap in enumerate(instance.clients["chat"].gaps) if gap > 1.2 * decode_s(2)]
    assert len(pauses) > 1
    assert all(later - earlier >= 32 for earlier, later in pairwise(pauses))
    assert instance.clients["chat"].tpot <= 0.025


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("target", [0.02, 0.03])
def test_no_request_takes_longer_per_token_than_the_target(depth: int, target: float) -> None:
    """More comes than can be served in time: prompts wait, requests that decode do not. The first ones are not
    counted: what steps take is not known yet."""
    instance = Instance(TimeSlicing(target, 32, STEP_TOKENS), depth=depth, noise=0.1, check_every=64)
    busy(instance, seconds=12.0, rate=12.0, output=80)
    clients = list(instance.clients.values())[10:]
    assert len(clients) > 60
    assert all(client.tpot <= 1.02 * target for client in clients if len(client.tokens) > 1)


def test_all_but_one_in_so_many_tokens_come_at_the_pace_of_decoding() -> None:
    """P99 with slices 128 tokens apart, against prompts that share steps with decoding."""
    p99 = {}
    for name, slicing in (("shared", None), ("sliced", TimeSlicing(0.03, 128, STEP_TOKENS))):
        instance = Instance(slicing, check_every=64)
        busy(instance, seconds=20.0, rate=5.0, output=200)
        gaps = sorted(gap for client in instance.clients.values() for gap in client.gaps)
        p99[name] = gaps[int(0.99 * len(gaps))]
    assert p99["sliced"] < 1.001 * decode_s(16) < 0.5 * p99["shared"]


def test_a_prompt_that_comes_to_a_rested_instance_computes_at_once() -> None:
    instance = Instance(TimeSlicing(0.05, 32, STEP_TOKENS))
    instance.arrive("chat", 16, 100)
    for _ in range(60):
        instance.step()
    came = instance.now
    instance.arrive("next", 40, 4)
    instance.step()
    assert instance.clients["next"].tokens == [instance.now]
    assert instance.now - came <= STEP_S + ROW_S + 40 * TOKEN_S


def test_prompts_are_not_held_up_where_nobody_decodes() -> None:
    """Four prompts of two steps each, and nothing else: no step is wasted, and all begin together."""
    instance = Instance(TimeSlicing(0.02, 128, STEP_TOKENS))
    for number in range(4):
        instance.arrive(f"r{number}", 2 * STEP_TOKENS, 1)
    instance.run_all()
    assert instance.steps <= 10


def test_a_target_that_cannot_be_met_leaves_prompts_a_share_of_the_time() -> None:
    """Decoding alone takes longer than the target: slices are due all the same."""
    instance = Instance(TimeSlicing(0.001, 16, STEP_TOKENS), check_every=16)
    instance.arrive("chat", 16, 2000)
    instance.step()
    instance.arrive("long", 400, 1)
    while not instance.clients["long"].tokens:
        instance.step()
    seconds = instance.now - instance.clients["long"].arrived
    assert seconds <= 400 * TOKEN_S / LEAST_SHARE * 2.5
    assert instance.clients["chat"].gaps[-1] > 0.0


def test_without_a_target_plans_are_what_they_were() -> None:
    """make_scheduler slices only where a target is given, and with the configured numbers."""
    sizes = {"num_blocks": 64, "max_model_len": 512, "eos_token_ids": ()}
    plain = make_scheduler(EngineConfig(model="x"), **sizes)  # type: ignore[arg-type]
    assert plain._slicing is None
    sliced = make_scheduler(EngineConfig(model="x", tpot_target_ms=40, prefill_every=64), **sizes)  # type: ignore[arg-type]
    assert sliced._slicing is not None
    assert (sliced._slicing.tpot_s, sliced._slicing.every) == (pytest.approx(0.04), 64)


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 300), st.integers(1, 40), st.booleans()), min_size=1, max_size=20
)


@settings(max_examples=40, deadline=None)
@given(
    load=arrivals,
    target=st.sampled_from((0.0005, 0.012, 0.02, 0.2)),
    every=st.integers(2, 40),
    depth=st.integers(1, 2),
    fair=st.booleans(),
    num_blocks=st.sampled_from((100, 400)),
    max_num_seqs=st.integers(1, 8),
    chunk=st.sampled_from((None, 7, 32)),
)
def test_every_request_ends(
    load: list[tuple[int, int, int, bool]],
    target: float,
    every: int,
    depth: int,
    fair: bool,
    num_blocks: int,
    max_num_seqs: int,
    chunk: int | None,
) -> None:
    """load: (steps after the one before, prompt, output, whether it shares a prefix). Invariants are checked at every
    step, also where KV is so short that requests lose their places."""
    policy = FairShare(chunk or STEP_TOKENS, 2, num_blocks * BLOCK, 0.5) if fair else None
    instance = Instance(
        TimeSlicing(target, every, STEP_TOKENS),
        policy=policy,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        depth=depth,
        prefill_chunk=chunk,
    )
    for number, (gap, prompt, output, shares) in enumerate(load):
        for _ in range(gap):
            instance.step()
        instance.arrive(f"r{number}", prompt, output, shared=min(prompt // 2, 40) if shares else 0)
    instance.run_all()
    for number, (_, _, output, _) in enumerate(load):
        assert len(instance.clients[f"r{number}"].tokens) == output


@settings(max_examples=20, deadline=None)
@given(every=st.integers(2, 40), target=st.sampled_from((0.001, 0.012, 0.05)), crowd=st.integers(1, 8))
def test_prompts_get_on_and_decoding_gets_on(every: int, target: float, crowd: int) -> None:
    """While others decode without end a prompt waits for a slice at most, and no request that decodes is passed over
    for longer than a slice may take."""
    instance = Instance(TimeSlicing(target, every, STEP_TOKENS), check_every=32)
    for number in range(crowd):
        instance.arrive(f"chat {number}", 8, 3000)
    for _ in range(3 * every):
        instance.step()
    instance.arrive("prompt", 48, 1)
    waits = 0
    while not instance.clients["prompt"].tokens:
        instance.step()
        waits += 1
        assert waits <= 5 * every + 10, "the prompt does not get on"
    longest = max(gap for number in range(crowd) for gap in instance.clients[f"chat {number}"].gaps[1:])
    assert longest <= every * max(target, 2 * decode_s(crowd)) + STEP_S + STEP_TOKENS * TOKEN_S
