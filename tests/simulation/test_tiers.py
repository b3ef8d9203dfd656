"""Lower tiers of simulated fleets: the production TieredCache over simulated memory and a simulated store."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import pytest
from support.fleets import faulty_fleet, run_faulty, tier_knobs

from kllm.simulation.config import SimulationConfig
from kllm.simulation.faults import STORE_KINDS, FaultError, FaultSchedule
from kllm.simulation.results import FleetResult
from kllm.simulation.run import SimulationError, simulate
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo

# Conversations that come back when others have pushed them out of a cache of 9,600 tokens.
SESSIONS: dict[str, Any] = {"trace": "sessions", "num_prompts": 80, "request_rate": 2.0, "turns": 4, "input_len": 2000}
SESSIONS |= {"think_time": 20.0, "instances": 2, "start_s": 1.0, "kv_tokens": 9600, "model": "llama-70b"}
SESSIONS |= {"fetch": "always", "max_num_seqs": 8}


@functools.cache
def run_sessions(**changes: Any) -> FleetResult:
    return simulate(SimulationConfig.model_validate(SESSIONS | changes))


def report(result: FleetResult) -> dict[str, Any]:
    return summarise(result, Slo())


def hit_rate(result: FleetResult) -> float:
    return sum(report(result)["hit_rate"].values())


def test_each_tier_adds_hits_and_says_so() -> None:
    without, with_l2 = run_sessions(), run_sessions(l2_memory="20GiB")
    with_l3 = run_sessions(l2_memory="20GiB", l3="shared")
    assert report(without)["tiers"] is None
    assert hit_rate(without) < hit_rate(with_l2) - 0.1 < hit_rate(with_l3) - 0.2
    rates, counts = report(with_l3)["hit_rate"], report(with_l3)["tiers"]
    assert min(rates.values()) > 0
    assert counts["loaded"] * 64 >= sum(with_l3.hits[1:]) > 0
    assert counts["fetched"] * 64 >= with_l3.hits[2] > 0
    assert counts["bytes_saved"] == counts["saved"] * 64 * 327_680  # 80 layers, 8 heads of 128, keys and values, bf16
    assert sum(with_l3.hits) == sum(outcome.cached_tokens for outcome in with_l3.outcomes)
    assert any("L2 of an instance holds 65,536 tokens" in note for note in with_l3.notes)
    assert any("L3 of the fleet" in note for note in with_l3.notes)


def test_samples_say_where_hits_came_from_when() -> None:
    result = run_sessions(l2_memory="20GiB", l3="shared")
    for tier in range(3):
        assert sum(sample.hits[tier] for sample in result.samples) == result.hits[tier]
    assert sum(sample.looked_up for sample in result.samples) == sum(o.prompt_tokens for o in result.outcomes)


def test_the_order_of_eviction_is_an_option() -> None:
    assert run_sessions(cache_eviction="lru").decision_hash != run_sessions(cache_eviction="value").decision_hash


def test_a_small_store_forgets() -> None:
    large, small = run_sessions(l3="shared"), run_sessions(l3="shared", l3_capacity="1GiB")
    assert hit_rate(small) < hit_rate(large)
    assert report(small)["tiers"]["l3_evicted"] > report(large)["tiers"]["l3_evicted"] == 0


def test_slow_tiers_cost_what_they_take() -> None:
    fast, slow = run_sessions(l2_memory="20GiB"), run_sessions(l2_memory="20GiB", l2_gb_s=0.5)
    assert report(slow)["tiers"]["load_s"] > 10 * report(fast)["tiers"]["load_s"]
    assert report(slow)["ttft_s"]["p90"] > report(fast)["ttft_s"]["p90"]


def test_a_store_that_fails_costs_hits_and_no_request() -> None:
    well = run_sessions(l3="shared")
    for fault in ("store-gone for 40", "store-full for 40", "store-slow for 40 by 5000"):
        result = run_sessions(l3="shared", faults=f"5 {fault}")
        assert {outcome.ending for outcome in result.outcomes} == {"completed"}
        assert hit_rate(result) < hit_rate(well)
        assert result.faults == [f"5 {fault}"]


def test_what_the_tiers_did_is_in_the_decision_log() -> None:
    lines = io.StringIO()
    config = SimulationConfig.model_validate(SESSIONS | {"l2_memory": "20GiB", "l3": "shared"})
    result = simulate(config, decisions=lines)
    kinds = [json.loads(line)[1] for line in lines.getvalue().splitlines()]
    assert {"save", "load", "exists", "get", "put"} <= set(kinds)
    assert run_sessions(l2_memory="20GiB", l3="shared").decision_hash == result.decision_hash
    assert run_sessions(l2_memory="20GiB", l3="shared", l3_latency_ms=1.001).decision_hash != result.decision_hash


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(SimulationError, match="l2_memory needs at least"):
        run_sessions(l2_memory="1MiB")
    with pytest.raises(FaultError, match="need a store"):
        run_sessions(l2_memory="20GiB", faults="5 store-full for 3")
    with pytest.raises(ValueError, match="need enable_prefix_caching"):
        SimulationConfig(l2_memory=1 << 40, enable_prefix_caching=False)


def test_the_quick_fault_seeds_have_tiers_of_every_kind() -> None:
    knobs = [tier_knobs(seed) for seed in range(60)]
    assert {tier.get("l2_write") for tier in knobs} == {None, "through", "selective", "back"}
    assert {(bool(tier.get("l2_memory")), tier.get("l3")) for tier in knobs} == {
        (False, None),
        (True, None),
        (True, "shared"),
        (False, "shared"),
    }
    kinds = {fault.kind for seed in range(60) for fault in faulty_fleet(seed).faults.faults}
    assert set(STORE_KINDS) <= kinds


@pytest.mark.parametrize("how", ["crash 1", "power 1 for 3", "hang 1 for 5", "partition 1 for 5", "stall 1"])
def test_an_instance_may_end_while_it_copies(how: str) -> None:
    """Every slot is accounted for, whatever it did at that moment."""
    schedule = FaultSchedule.parse("; ".join(f"{second / 2} {how}" for second in range(3, 36, 7)), 4)
    result = run_faulty(4, faults=schedule, check=True)
    assert {outcome.ending for outcome in result.outcomes} <= {"completed", "abort"}
    assert result.tiers is not None
    assert result.tiers.saved > 0
