from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kllm.costs.online import OnlineStepTimes, StepFit
from kllm.costs.step import StepWork

TRUTH = StepFit(base=0.02, row=2e-4, new_token=3e-5, context_token=2e-8)


def seconds(fit: StepFit, work: StepWork) -> float:
    return fit.base + fit.row * work.rows + fit.new_token * work.new_tokens + fit.context_token * work.context


def decode(rows: int, context: int) -> StepWork:
    return StepWork(rows=rows, new_tokens=rows, context=rows * context)


def prefill(rows: int, context: int, tokens: int) -> StepWork:
    return StepWork(rows=rows + 1, new_tokens=rows + tokens, context=rows * context + tokens)


def serve(rng: random.Random, steps: int) -> list[StepWork]:
    """Mostly decoding, with prompts now and then; the batch grows and shrinks slowly."""
    works, rows = [], 16
    for _ in range(steps):
        rows = min(64, max(1, rows + rng.choice((-1, 0, 1))))
        context = rng.randint(200, 6000)
        works.append(prefill(rows, context, rng.randint(50, 8000)) if rng.random() < 0.1 else decode(rows, context))
    return works


def observe(
    online: OnlineStepTimes, works: list[StepWork], rng: random.Random, noise: float = 0.0, slow: float = 1.0
) -> None:
    for work in works:
        online.observe(work, slow * seconds(TRUTH, work) * rng.lognormvariate(0.0, noise))


def assert_right(fit: StepFit, slow: float, within: float) -> None:
    for work in (decode(1, 500), decode(20, 2000), decode(60, 4000), prefill(20, 2000, 500), prefill(20, 2000, 8000)):
        assert seconds(fit, work) == pytest.approx(slow * seconds(TRUTH, work), rel=within)


def test_nothing_is_known_before_the_first_step() -> None:
    assert OnlineStepTimes().fit(0.0) == StepFit()


def test_coefficients_are_recovered() -> None:
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, serve(rng, 2000), rng)
    fit = online.fit(0.0)
    assert fit[:4] == pytest.approx(TRUTH[:4], rel=1e-3)
    assert 50 < fit.samples < 1000


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_borne(seed: int) -> None:
    rng, online = random.Random(seed), OnlineStepTimes()
    observe(online, serve(rng, 2000), rng, noise=0.05)
    assert_right(online.fit(0.0), 1.0, 0.12)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_steps_that_stalled_change_little(seed: int) -> None:
    rng, online = random.Random(seed), OnlineStepTimes()
    for number, work in enumerate(serve(rng, 2000)):
        stalled = 20.0 if number % 25 == 7 else 1.0
        online.observe(work, stalled * seconds(TRUTH, work) * rng.lognormvariate(0.0, 0.03))
    assert_right(online.fit(0.0), 1.0, 0.15)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slow", [2.0, 0.5])
def test_another_speed_is_known_after_32_steps(seed: int, slow: float) -> None:
    rng, online = random.Random(seed), OnlineStepTimes()
    observe(online, serve(rng, 2000), rng, noise=0.05)
    online.fit(0.0)
    observe(online, serve(rng, 32), rng, noise=0.05, slow=slow)
    assert_right(online.fit(1.0), slow, 0.2)
    observe(online, serve(rng, 600), rng, noise=0.05, slow=slow)
    assert_right(online.fit(2.0), slow, 0.15)


def test_what_a_prompt_costs_is_not_forgotten_while_there_is_none() -> None:
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, serve(rng, 500), rng, noise=0.03)
    observe(online, [decode(rng.randint(28, 32), 3000) for _ in range(5000)], rng, noise=0.03)
    work = prefill(30, 3000, 4000)
    assert seconds(online.fit(0.0), work) == pytest.approx(seconds(TRUTH, work), rel=0.15)


def test_where_steps_do_not_tell_tokens_cost_and_rows_do_not() -> None:
    """Decoding alone: a row is a token. What is believed of prompts is then too slow rather than too fast."""
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, [decode(rng.randint(1, 64), rng.randint(100, 9000)) for _ in range(500)], rng)
    fit = online.fit(0.0)
    assert fit.row == pytest.approx(0.0, abs=1e-8)
    assert fit.new_token == pytest.approx(TRUTH.row + TRUTH.new_token, rel=1e-3)


@pytest.mark.parametrize("change", [lambda _: 0.02, lambda work: 1e-4 * work.rows, lambda work: 1e-8 * work.context])
def test_no_coefficient_is_ever_negative(change: Callable[[StepWork], float]) -> None:
    rng, online = random.Random(3), OnlineStepTimes()
    for work in serve(rng, 300):
        online.observe(work, change(work) * rng.lognormvariate(0.0, 0.5))
    assert all(value >= 0.0 for value in online.fit(0.0))


def test_it_is_fitted_again_at_most_once_a_second() -> None:
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, serve(rng, 100), rng)
    first = online.fit(10.0)
    observe(online, serve(rng, 50), rng, slow=3.0)
    assert online.fit(10.9) is first
    assert online.fit(11.0) is not first


def test_while_steps_take_what_is_expected_it_is_fitted_less_often() -> None:
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, serve(rng, 2000), rng)
    first = online.fit(10.0)
    observe(online, serve(rng, 50), rng)
    assert online.fit(14.9) is first
    assert online.fit(15.0) is not first


def test_a_clock_that_was_set_back_does_not_stop_it() -> None:
    rng, online = random.Random(1), OnlineStepTimes()
    observe(online, serve(rng, 100), rng)
    first = online.fit(1000.0)
    observe(online, serve(rng, 50), rng, slow=3.0)
    assert online.fit(5.0) is not first
