"""SLO Load of whole fleets in virtual time: production gateway, scheduler and fit."""

from __future__ import annotations

import pytest
from support.fleets import LinearTimes, small_instance

from kllm.cluster.slo_snapshot import SloLimits, SloSnapshot
from kllm.simulation.faults import FaultSchedule
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.results import FleetResult
from kllm.workload.sample import OWN, Sample, TokenSource

LIMITS = SloLimits(ttft_s=0.5, tpot_s=0.05)


def steady(count: int, gap_s: float, start_s: float = 0.0, prompt: int = 100, output: int = 40) -> list[Sample]:
    return [
        Sample((((OWN, round(start_s * 1000) + index), prompt),), output, start_s + gap_s * index)
        for index in range(count)
    ]


def serve(samples: list[Sample], faults: str | None = None, instances: int = 2) -> FleetResult:
    spec = FleetSpec(
        instances=instances,
        instance=small_instance(),
        times=LinearTimes,
        gateway={"slo": LIMITS},
        sample_every_s=0.5,
        faults=FaultSchedule() if faults is None else FaultSchedule.parse(faults, instances),
    )
    return run_fleet(spec, samples, TokenSource(0, 1000))


def at(result: FleetResult, second: float) -> SloSnapshot:
    return next(snapshot for when, snapshot in result.slo if when >= second)


def test_light_load_is_far_below_one_and_its_prediction_right() -> None:
    result = serve(steady(100, 0.2))
    prefill, decode = (at(result, 15.0).pools[pool].side for pool in ("prefill", "decode"))
    assert prefill.predicted_s is not None
    assert decode.predicted_s is not None
    ttft = sorted(outcome.ttft_s or 0.0 for outcome in result.outcomes)[50]
    tpot = sorted(outcome.tpot_s or 0.0 for outcome in result.outcomes)[50]
    assert prefill.predicted_s == pytest.approx(ttft, rel=0.5)
    assert decode.predicted_s == pytest.approx(tpot, rel=0.25)
    assert prefill.load < 0.2
    assert decode.load < 0.25


def test_a_burst_is_predicted_before_it_is_measured() -> None:
    """150 prompts at once are more than 2 s of work for two instances; nobody is late yet when the first sample sees
    them."""
    result = serve([*steady(50, 0.2), *steady(150, 0.002, start_s=10.25)])
    first = {
        kind: next(when for when, snapshot in result.slo if getattr(snapshot.pools["prefill"].side, kind) >= 1.0)
        for kind in ("predicted", "measured")
    }
    assert first["predicted"] == 10.5
    assert first["measured"] > 10.5


def test_a_slow_machine_shows_in_its_own_load_only() -> None:
    result = serve(steady(150, 0.2), faults="10 slow 1 for 100 by 4")
    before, after = at(result, 9.5), at(result, 20.0)
    decode = [[each.decode.predicted if each.decode else 0.0 for each in shot.instances] for shot in (before, after)]
    assert decode[0][0] == pytest.approx(decode[0][1], rel=0.3)
    assert decode[1][1] > 2.5 * decode[1][0]


def test_an_instance_that_hangs_raises_the_load_of_those_that_wait() -> None:
    result = serve(steady(1, 1.0), faults="0.001 hang 0 for 5; 0.001 hang 1 for 5")
    assert at(result, 4.0).pools["prefill"].side.measured_s == pytest.approx(4.0, abs=0.1)


def test_the_same_seed_gives_the_same_load() -> None:
    first, again = (serve(steady(60, 0.05)) for _ in range(2))
    assert first.slo == again.slo
    assert first.decision_hash == again.decision_hash
