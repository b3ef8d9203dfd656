"""Prefill and Decode Pools in virtual time: what each instance is used for, and that nothing is lost."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from support.fleets import VOCAB_SIZE, faulty_fleet, small_load

from kllm.cluster.pool_routing import GlobalPools
from kllm.messages import Role
from kllm.simulation.config import SimulationConfig
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.results import FleetResult
from kllm.simulation.run import saturation_rps, simulate
from kllm.workload.sample import TokenSource

POOLS: dict[str, Any] = {"trace": "random", "num_prompts": 40, "request_rate": 8.0, "input_len": 4000, "output_len": 30}
POOLS |= {"prefill": 2, "decode": 2, "start_s": 1.0, "model": "llama-70b"}
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")


def routes(**fleet: Any) -> tuple[FleetResult, dict[str, list[int]]]:
    """The run, and where each request went, in order."""
    log = io.StringIO()
    result = simulate(SimulationConfig.model_validate(POOLS | fleet), decisions=log)
    went: dict[str, list[int]] = {}
    for line in log.getvalue().splitlines():
        _, kind, what = json.loads(line)
        if kind == "route":
            request_id, _, place = what
            went.setdefault(request_id, []).append(place)
    return result, went


def test_p_prefills_and_d_decodes_what_it_pulls() -> None:
    result, went = routes(pools="separate-always")
    assert all(outcome.ending == "completed" for outcome in result.outcomes)
    assert all(len(places) == 2 and places[0] < 2 <= places[1] for places in went.values())
    assert result.tiers is not None
    assert result.tiers.pulled == 40 * (4000 // 64)
    assert result.tiers.pull_failures == 0


def test_groups_keep_to_themselves() -> None:
    _, went = routes(pools="groups:2")
    assert {tuple(places) for places in went.values()} == {(0, 2), (1, 3)}


def test_short_prompts_stay_on_d_where_p_is_behind() -> None:
    _, went = routes(input_len=100, request_rate=200.0, max_num_batched_tokens=256, num_prompts=200)
    alone = [places[0] for places in went.values() if len(places) == 1]
    assert any(place >= 2 for place in alone)


def test_decisions_are_repeatable() -> None:
    config = SimulationConfig.model_validate(POOLS)
    assert simulate(config).decision_hash == simulate(config).decision_hash


def test_saturation_is_that_of_the_side_with_too_little() -> None:
    def rate(**fleet: int) -> float:
        return saturation_rps(SimulationConfig.model_validate(POOLS | fleet))

    assert rate(prefill=4) == pytest.approx(2 * rate(prefill=2), rel=1e-3)  # prompts are the bottleneck
    assert rate(decode=4) == pytest.approx(rate(decode=2), rel=1e-3)


def faulty_pools(seed: int) -> FleetSpec:
    spec = faulty_fleet(seed)
    engine = spec.instance.engine.model_copy(
        update={"report_cache": True, "kv_transfer": "shm", "transfer_memory": 100 << 20}
    )
    return replace(spec, instance=replace(spec.instance, engine=engine), roles=ROLES, pools=GlobalPools)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_when_instances_fail(seed: int) -> None:
    """Raises when a token is lost, repeated or wrong, or anything is held for nobody."""
    run_fleet(faulty_pools(seed), small_load(seed), TokenSource(seed, VOCAB_SIZE))
