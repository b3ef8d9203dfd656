from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.cluster.slo_load import EARLY_TOKENS, WINDOW_S, SloLoad
from kllm.cluster.slo_prediction import InstanceReport
from kllm.cluster.slo_snapshot import SloLimits, SloSnapshot
from kllm.messages import EngineLoad, Role, StepTimes

TIMES = StepTimes(base=0.02, row=1e-4, new_token=1e-4, context_token=1e-7, samples=100)
LIMITS = SloLimits(ttft_s=2.0, tpot_s=0.1)


def report(index: int = 0, role: Role = "both", **load: Any) -> InstanceReport:
    return InstanceReport(
        index=index,
        load=EngineLoad(**({"step_times": TIMES} | load)),
        role=role,
        chunk_tokens=1000,
        max_num_seqs=64,
        kv_tokens=100_000,
    )


def loads(snapshot: SloSnapshot) -> tuple[float, float]:
    return snapshot.pools["prefill"].side.load, snapshot.pools["decode"].side.load


def serve(slo: SloLoad, name: str, at: float, ttft: float, tpot: float, tokens: int = 21, instance: int = 0) -> None:
    """A request from arrival to end."""
    outputs = list(range(tokens))
    slo.arrived(name, at, 500, outputs)
    slo.submitted(name, at, instance, 500)
    slo.has_output(name, at + ttft, 0)
    slo.ended(name, at + ttft + tpot * (tokens - 1))


def test_idle_fleet_uses_next_to_nothing() -> None:
    prefill, decode = loads(SloLoad(LIMITS).snapshot(0.0, [report(0), report(1)]))
    assert 0.0 < prefill < 0.02
    assert 0.0 < decode < 0.25  # a step without work takes its 20 ms too


def test_without_instances_and_requests_there_is_no_load() -> None:
    snapshot = SloLoad(LIMITS).snapshot(0.0, [])
    assert loads(snapshot) == (0.0, 0.0)
    assert snapshot.pools["prefill"].chosen is None
    assert snapshot.pools["prefill"].instances == 0


def test_a_request_that_never_gets_a_token_counts_with_its_age() -> None:
    slo = SloLoad(LIMITS)
    slo.arrived("a", 10.0, 100, [])
    slo.submitted("a", 10.0, 0, 100)
    for age in (0.5, 2.0, 5.0, 100.0):
        snapshot = slo.snapshot(10.0 + age, [report(0), report(1)])
        side = snapshot.pools["prefill"].side
        assert side.measured == pytest.approx(age / 2.0)
        assert snapshot.instances[0].prefill is not None
        assert snapshot.instances[0].prefill.measured_s == pytest.approx(age)
        assert snapshot.instances[1].prefill is not None
        assert snapshot.instances[1].prefill.measured_s == 0.0
    assert side.larger == "measured"
    assert loads(snapshot)[0] == pytest.approx(50.0)


def test_it_counts_where_no_instance_is_there() -> None:
    slo = SloLoad(LIMITS)
    slo.arrived("a", 0.0, 100, [])
    assert loads(slo.snapshot(4.0, []))[0] == pytest.approx(2.0)


def test_one_that_gave_up_late_counts_and_one_that_left_at_once_does_not() -> None:
    slo = SloLoad(LIMITS)
    slo.arrived("a", 0.0, 100, [])
    slo.arrived("b", 0.0, 100, [])
    slo.ended("a", 0.5)
    assert slo.snapshot(0.5, []).pools["prefill"].side.samples == 1
    slo.ended("b", 6.0)
    assert loads(slo.snapshot(6.0, []))[0] == pytest.approx(3.0)
    assert loads(slo.snapshot(6.0 + WINDOW_S, []))[0] == 0.0


def test_load_is_one_where_nine_in_ten_just_meet_the_slo() -> None:
    slo = SloLoad(LIMITS)
    for number in range(101):
        serve(slo, f"{number}", 10.0, ttft=4.0 * number / 180, tpot=0.2 * number / 180)
    snapshot = slo.snapshot(30.0, [report()])
    assert loads(snapshot) == (pytest.approx(1.0), pytest.approx(1.0))
    assert {snapshot.pools[pool].side.larger for pool in ("prefill", "decode")} == {"measured"}


def test_time_per_token_of_one_that_goes_on() -> None:
    slo = SloLoad(LIMITS)
    outputs: list[int] = []
    slo.arrived("a", 0.0, 100, outputs)
    slo.submitted("a", 0.0, 3, 100)
    outputs.append(1)
    slo.has_output("a", 1.0, 0)
    outputs.extend(range(99))
    snapshot = slo.snapshot(31.0, [report(3)])
    assert snapshot.pools["decode"].side.measured_s == pytest.approx(30.0 / 100)
    assert snapshot.instances[0].decode is not None
    assert snapshot.instances[0].decode.measured_s == pytest.approx(30.0 / 100)
    assert slo.snapshot(61.0, [report(3)]).pools["decode"].side.measured_s == pytest.approx(0.6)  # it has stalled


def test_what_waits_ahead_is_known_before_any_report() -> None:
    slo = SloLoad(LIMITS)
    before = loads(slo.snapshot(0.0, [report()]))[0]
    for number in range(50):
        slo.arrived(f"{number}", 0.0, 1000, [])
        slo.submitted(f"{number}", 0.0, 0, 1000)
    side = slo.snapshot(0.0, [report()]).pools["prefill"].side
    assert side.predicted > 2.5 > before  # 50,000 tokens of 0.1 ms
    assert side.measured == 0.0
    later = slo.snapshot(2.0, [report(lacking=10_000)]).pools["prefill"].side  # the report says what is done of it
    assert 0.5 < later.predicted < 0.8
    assert side.larger == "predicted"


def test_a_pool_predicts_for_the_instance_where_the_next_one_does_best() -> None:
    slo = SloLoad(LIMITS)
    for number in range(50):
        slo.arrived(f"{number}", 0.0, 1000, [])
        slo.submitted(f"{number}", 0.0, 0, 1000)
    snapshot = slo.snapshot(0.0, [report(0), report(1)])
    assert snapshot.pools["prefill"].chosen == 1
    assert loads(snapshot)[0] < 0.2
    assert snapshot.instances[0].prefill is not None
    assert snapshot.instances[0].prefill.load > 2.5


def test_sides_are_those_of_the_role() -> None:
    slo = SloLoad(LIMITS)
    snapshot = slo.snapshot(0.0, [report(0, "prefill"), report(1, "decode"), report(2)])
    assert [each.prefill is None for each in snapshot.instances] == [False, True, False]
    assert [each.decode is None for each in snapshot.instances] == [True, False, False]
    assert {name: pool.instances for name, pool in snapshot.pools.items()} == {"prefill": 2, "decode": 2}


def test_decode_instances_expect_what_is_being_prefilled() -> None:
    slo = SloLoad(LIMITS)
    reports = [report(0, "prefill"), report(1, "decode"), report(2, "decode")]
    before = loads(slo.snapshot(0.0, reports))[1]
    for number in range(40):
        slo.arrived(f"{number}", 0.0, 1000, [])
        slo.submitted(f"{number}", 0.0, 0, 1000)
    snapshot = slo.snapshot(0.0, reports)
    assert [each.demand.joining for each in snapshot.instances] == [40.0, 20.0, 20.0]
    assert loads(snapshot)[1] > 1.05 * before


def test_what_a_decode_instance_has_to_compute_first_is_in_its_report() -> None:
    snapshot = SloLoad(LIMITS).snapshot(0.0, [report(0, "decode", lacking=700)])
    assert snapshot.instances[0].demand.ahead == 700.0


def test_typical_request_is_what_had_to_be_computed() -> None:
    slo = SloLoad(LIMITS)
    slo.arrived("a", 0.0, 4000, [])
    slo.submitted("a", 0.0, 0, 4000)  # nobody knew that it was cached
    slo.has_output("a", 0.1, 3900)
    snapshot = slo.snapshot(0.1, [report()])
    assert (snapshot.typical_uncached, snapshot.typical_prompt) == (100.0, 4000.0)


def test_kv_guard_is_not_part_of_the_load() -> None:
    slo = SloLoad(LIMITS)
    empty, full = (slo.snapshot(0.0, [report(kv_usage=usage)]) for usage in (0.0, 0.99))
    assert loads(empty) == loads(full)
    assert full.instances[0].kv_guard == pytest.approx(1.1)


def test_an_instance_that_has_left_leaves_nothing_behind() -> None:
    slo = SloLoad(LIMITS)
    serve(slo, "a", 0.0, ttft=10.0, tpot=1.0)
    slo.arrived("b", 0.0, 100, [])
    slo.submitted("b", 0.0, 0, 100)
    slo.left(0)
    snapshot = slo.snapshot(40.0, [report(0)])
    assert snapshot.instances[0].prefill is not None
    assert snapshot.instances[0].prefill.measured_s == 0.0
    assert snapshot.pools["prefill"].side.measured_s == pytest.approx(40.0)  # its request waits on


def test_events_of_requests_that_are_not_known_do_nothing() -> None:
    slo = SloLoad(LIMITS)
    slo.submitted("x", 0.0, 0, 10)
    slo.has_output("x", 0.0, 0)
    slo.ended("x", 0.0)
    assert slo.snapshot(0.0, []) == SloLoad(LIMITS).snapshot(0.0, [])


# --- against everything remembered and counted again ---


@dataclass
class Known:
    arrived: float
    instance: int | None = None
    first: float | None = None
    end: float | None = None
    outputs: list[int] = field(default_factory=list)


def expected(known: list[Known], now: float, instance: int | None) -> tuple[float, float]:
    """p90 of TTFT and of TPOT, of one instance or all."""
    mine = [each for each in known if instance is None or each.instance == instance]
    done = [each.first - each.arrived for each in mine if each.first is not None and each.first > now - WINDOW_S]
    done += [
        each.end - each.arrived
        for each in mine
        if each.first is None and each.end is not None and each.end > now - WINDOW_S and each.end - each.arrived > 2.0
    ]
    ages = [now - each.arrived for each in mine if each.first is None and each.end is None]
    gaps = [
        (each.end - each.first) / (len(each.outputs) - 1)
        for each in mine
        if each.first is not None and each.end is not None and each.end > now - WINDOW_S and len(each.outputs) > 1
    ]
    gaps += [
        (now - each.first) / max(EARLY_TOKENS, len(each.outputs))
        for each in mine
        if each.first is not None and each.end is None
    ]

    def p90(values: list[float]) -> float:
        return float(np.percentile(values, 90)) if values else 0.0

    return max(p90(done), p90(done + ages)), p90(gaps)


@given(st.integers(0, 2**32), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_measured_is_what_counting_everything_again_gives(seed: int, events: int) -> None:
    rng, slo, now = random.Random(seed), SloLoad(LIMITS), 0.0
    known: dict[str, Known] = {}
    for number in range(events):
        now += rng.choice((0.0, 0.1, 1.0, 5.0))
        open_ids = [name for name, each in known.items() if each.end is None]
        action = rng.choice(("arrive", "submit", "output", "output", "end"))
        if action == "arrive" or not open_ids:
            each = known[f"{number}"] = Known(now)
            slo.arrived(f"{number}", now, 100, each.outputs)
            continue
        name = rng.choice(open_ids)
        each = known[name]
        if action == "submit":
            each.instance = rng.randrange(2) if each.first is None else each.instance
            slo.submitted(name, now, each.instance or 0, 100) if each.instance is not None else None
        elif action == "output" and each.instance is not None:
            each.outputs.extend(range(rng.randint(1, 20)))
            each.first = now if each.first is None else each.first
            slo.has_output(name, now, 0)
        elif action == "end":
            each.end = now
            slo.ended(name, now)
    snapshot = slo.snapshot(now, [report(0), report(1)])
    pools = snapshot.pools
    everything = expected(list(known.values()), now, None)
    assert (pools["prefill"].side.measured_s, pools["decode"].side.measured_s) == pytest.approx(everything)
    for instance in snapshot.instances:
        assert instance.prefill is not None
        assert instance.decode is not None
        measured = (instance.prefill.measured_s, instance.decode.measured_s)
        assert measured == pytest.approx(expected(list(known.values()), now, instance.index))
    assert snapshot == slo.snapshot(now, [report(0), report(1)])
