from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kllm.cluster.slo_prediction import Demand, InstanceReport, kv_guard, predict_tpot, predict_ttft
from kllm.messages import EngineLoad, StepTimes

TIMES = StepTimes(base=0.02, row=1e-4, new_token=1e-4, context_token=1e-7, samples=100)


def report(**load: Any) -> InstanceReport:
    return InstanceReport(
        index=0,
        load=EngineLoad(**({"step_times": TIMES} | load)),
        chunk_tokens=1000,
        max_num_seqs=64,
        kv_tokens=100_000,
    )


def demand(**fields: float) -> Demand:
    return Demand(**({"own": 500.0, "prompt": 800.0} | fields))


@pytest.mark.parametrize("times", [None, StepTimes()])
def test_nothing_is_predicted_before_steps_were_seen(times: StepTimes | None) -> None:
    assert predict_ttft(report(step_times=times), demand()) is None
    assert predict_tpot(report(step_times=times), demand()) is None


def test_idle_instance() -> None:
    """One step with the prompt."""
    assert predict_ttft(report(), demand()) == pytest.approx(0.02 + 1e-4 + 500 * 1e-4 + 800 * 1e-7)
    assert predict_tpot(report(), demand()) == pytest.approx(0.02 + 2e-4 + 800 * 1e-7)


def test_tokens_ahead_are_computed_first_in_whole_chunks() -> None:
    alone, behind = predict_ttft(report(), demand()), predict_ttft(report(), demand(ahead=9_500.0))
    assert alone is not None
    assert behind is not None
    assert behind - alone > 9_500 * 1e-4 + 9 * 0.02


def test_a_batch_that_decodes_slows_prompts_down() -> None:
    busy = report(running=32, decoding=32, context=32 * 2000)
    predicted = predict_ttft(busy, demand(ahead=5_000.0))
    quiet = predict_ttft(report(), demand(ahead=5_000.0))
    assert predicted is not None
    assert quiet is not None
    assert predicted > quiet + 5 * 32 * 2000 * 1e-7


STEP_S = 0.02 + 20 * 2e-4 + 40_000 * 1e-7


def test_places_come_with_the_ends_of_others() -> None:
    """Ten of 20 that decode must end first, each after 300 steps."""
    busy = report(running=64, waiting=9, decoding=20, context=40_000)
    assert predict_ttft(busy, demand(output=300.0)) == pytest.approx(10 / 20 * 300 * STEP_S)
    unknown = predict_ttft(busy, demand())
    assert unknown is not None
    assert unknown < 1.0


def test_room_for_kv_comes_with_the_ends_of_others() -> None:
    """10,000 tokens are free, 30,000 wanted; those that decode hold 2,000 each."""
    busy = report(running=20, decoding=20, context=40_000, kv_usage=0.9)
    predicted = predict_ttft(busy, demand(ahead=29_500.0, output=300.0))
    assert predicted == pytest.approx(10 / 20 * 300 * STEP_S)
    roomy = predict_ttft(busy, demand(ahead=5_000.0, output=300.0))
    assert roomy is not None
    assert roomy < 1.0


def test_time_per_token_grows_with_batch_context_and_those_that_will_join() -> None:
    now = report(running=20, decoding=20, context=40_000)
    steps = [
        predict_tpot(report(running=10, decoding=10, context=20_000), demand()),
        predict_tpot(now, demand()),
        predict_tpot(report(running=20, decoding=20, context=80_000), demand()),
        predict_tpot(report(running=20, decoding=20, context=80_000), demand(joining=30.0)),
    ]
    assert steps == sorted(steps, key=lambda seconds: seconds or 0.0)
    assert len(set(steps)) == 4


def test_prompts_take_their_share_of_the_time() -> None:
    """1e-4 s a token: 5,000 tokens a second take half of it."""
    now = report(running=20, decoding=20, context=40_000)
    alone, half = predict_tpot(now, demand()), predict_tpot(now, demand(token_rate=5_000.0))
    assert alone is not None
    assert half == pytest.approx(2 * alone)


def test_no_step_is_longer_than_a_full_one() -> None:
    now = report(running=20, decoding=20, context=40_000)
    full = 0.02 + 20 * 2e-4 + 40_000 * 1e-7 + 1e-4 + 980 * 1e-4
    assert predict_tpot(now, demand(token_rate=9_990.0)) == pytest.approx(full)
    assert predict_tpot(now, demand(token_rate=1e6)) == pytest.approx(full)


def test_more_than_its_places_never_decode() -> None:
    full = predict_tpot(report(running=64, decoding=64, context=0), demand())
    assert predict_tpot(report(running=64, decoding=64, context=0), demand(joining=500.0)) == full


def test_kv_guard_counts_what_is_to_be_computed() -> None:
    assert kv_guard(report(kv_usage=0.45), 0.0) == pytest.approx(0.5)
    assert kv_guard(report(kv_usage=0.45), 45_000.0) == pytest.approx(1.0)
    assert kv_guard(msgspec.structs.replace(report(kv_usage=0.45), kv_tokens=0), 45_000.0) == pytest.approx(0.5)
