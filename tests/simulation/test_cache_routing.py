"""Cache-aware routing of simulated fleets: what the gateway believes is what instances hold, and it brings hits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fleets import VOCAB_SIZE, faulty_fleet, small_load
from support.virtual_time import run

from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.prefix_index import Tier, short_hashes
from kllm.cluster.routing_view import routing_view
from kllm.simulation.config import SimulationConfig
from kllm.simulation.fabric import Weather
from kllm.simulation.faults import FaultSchedule
from kllm.simulation.fleet import Fleet, FleetSpec
from kllm.simulation.results import FleetResult
from kllm.simulation.run import simulate
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo
from kllm.workload.sample import TokenSource

SESSIONS: dict[str, Any] = {"trace": "sessions", "num_prompts": 160, "request_rate": 4.0, "turns": 4, "input_len": 2000}
SESSIONS |= {"think_time": 5.0, "instances": 4, "start_s": 1.0, "model": "llama-70b"}


class WatchedFleet(Fleet):
    """When all requests have ended, compares the gateway's directory with what instances hold."""

    compared = 0

    async def _settle(self) -> None:
        self.injector.end_all()
        await asyncio.sleep(10.0)  # what was lost is noticed, and asked for
        directory = self.gateway.directory
        assert directory is not None
        for launcher in self.launchers:
            instance = launcher.current
            if instance is None or not instance.alive or instance.scheduler is None:
                continue
            held = short_hashes(list(instance.scheduler.kv.hashes)) if instance.scheduler.kv.tree.num_blocks else []
            assert np.array_equal(np.sort(directory.held(launcher.node.index, Tier.DEVICE)), np.sort(held))
            assert directory.known(launcher.node.index).device_blocks == len(held)
            if instance.tiers is not None and instance.tiers.hashes:
                below = directory.held(launcher.node.index, Tier.HOST)
                assert np.array_equal(np.sort(below), np.sort(short_hashes(instance.tiers.hashes)))
            self.compared += 1
        await super()._settle()


def reporting(spec: FleetSpec) -> FleetSpec:
    """With cache-aware routing, and instances that report for it."""
    engine = spec.instance.engine.model_copy(update={"report_cache": True})
    return replace(spec, instance=replace(spec.instance, engine=engine), router=CacheAware)


def watched(spec: FleetSpec, seed: int) -> WatchedFleet:
    spec = reporting(spec)

    async def main() -> WatchedFleet:
        fleet = WatchedFleet(spec)
        await fleet.run(small_load(seed), TokenSource(seed, VOCAB_SIZE))
        return fleet

    return run(main())


@pytest.mark.parametrize("seed", range(6))
def test_the_directory_is_right_after_faults(seed: int) -> None:
    assert watched(faulty_fleet(seed), seed).compared > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_directory_is_right_after_lost_reports(seed: int) -> None:
    weather = Weather(loss=0.05, duplicate=0.05, reorder=0.05)
    fleet = watched(faulty_fleet(seed, faults=FaultSchedule(), weather=weather), seed)
    assert fleet.compared == 4
    assert fleet.gateway.directory is not None
    assert fleet.gateway.directory.num_gaps > 0


@pytest.mark.parametrize("weather", [Weather(report_loss=0.2), Weather(report_late_s=1.0)])
def test_the_directory_is_right_after_late_reports(weather: Weather) -> None:
    fleet = watched(faulty_fleet(1, faults=FaultSchedule(), weather=weather), 1)
    assert fleet.compared == 4
    assert fleet.gateway.directory is not None
    assert (fleet.gateway.directory.num_gaps > 0) == (weather.report_loss > 0)


def test_instances_whose_reports_never_come_are_noticed_and_still_used() -> None:
    class BlindFleet(Fleet):
        async def _settle(self) -> None:
            view = routing_view(self.gateway.slots, self.gateway.directory, self.gateway.routing)
            assert [instance.blind for instance in view.instances] == [True] * 4
            assert all(instance.cache.dumps == 0 for instance in view.instances if instance.cache is not None)
            assert sum(instance.counts.decisions for instance in view.instances) == view.decisions > 0
            await super()._settle()

    spec = reporting(faulty_fleet(0, faults=FaultSchedule(), weather=Weather(report_loss=1.0)))

    async def main() -> FleetResult:
        return await BlindFleet(spec).run(small_load(0), TokenSource(0, VOCAB_SIZE))

    endings = {outcome.ending for outcome in run(main()).outcomes}
    assert endings <= {"completed", "abort"}, "some clients have no patience; nothing else goes wrong"


def test_it_brings_hits() -> None:
    rates = {}
    for routing in ("round-robin", "cache-aware"):
        result = simulate(SimulationConfig.model_validate(SESSIONS | {"routing": routing}))
        rates[routing] = sum(summarise(result, Slo())["hit_rate"].values())
    assert rates["cache-aware"] > rates["round-robin"] + 0.2


def test_decisions_are_repeatable() -> None:
    config = SimulationConfig.model_validate(SESSIONS | {"routing": "cache-aware", "num_prompts": 60})
    assert simulate(config).decision_hash == simulate(config).decision_hash


def test_where_nothing_is_cached_nothing_is_believed_to_be() -> None:
    """Requests of one prefix are not sent after each other to instances that keep nothing."""
    config = {"trace": "shared-prefix", "num_prompts": 100, "request_rate": 12, "instances": 4, "start_s": 1.0}
    config |= {"prefix_len": 8000, "input_len": 200, "output_len": 20, "enable_prefix_caching": False}
    result = simulate(SimulationConfig.model_validate(config | {"routing": "cache-aware"}))
    running = [instance["running"] for instance in summarise(result, Slo(4000.0, 60.0))["instances"]]
    assert max(running) < 2 * min(running)
