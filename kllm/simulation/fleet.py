"""Fleet: a gateway, its instances on simulated nodes, clients and faults, from start to the last request's end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.cluster.gateway import Gateway
from kllm.cluster.pool_routing import PoolPolicy
from kllm.cluster.routing import LeastLoaded, Router
from kllm.cluster.slo_snapshot import SloSnapshot
from kllm.costs.noise import StepTimeSource
from kllm.messages import Role
from kllm.simulation.clients import Clients
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.fabric import Fabric, Weather
from kllm.simulation.faults import FaultInjector, FaultSchedule
from kllm.simulation.launcher import InstanceSpec, SimulatedInstance, SimulatedLauncher
from kllm.simulation.loop import run
from kllm.simulation.node import Node
from kllm.simulation.results import FleetResult
from kllm.simulation.store import SimulatedStore
from kllm.simulation.timeline import Timeline, hits_by_tier
from kllm.workload.sample import Sample, TokenSource

STUCK_S = 24 * 3600.0  # simulated seconds without any request ending, after the last arrival
Progress = Callable[[float, int, int], None]  # simulated seconds, requests ended, requests in all


class Stuck(RuntimeError):
    """Requests are in flight and none of them ends."""


@dataclass
class FleetSpec:
    """What is simulated. times: the true step times of one instance, from a generator of random numbers of its own.

    roles: of the instances, in order; none: each prefills and decodes. pools: how P and D are chosen then.
    gateway: further arguments of Gateway. clock_spread_s: node clocks are wrong by up to so much.
    check: verify the books of gateway and schedulers at every sample, not only at the end.
    sample_every_s: simulated seconds between looks at the instances.
    """

    instances: int
    instance: InstanceSpec
    times: Callable[[random.Random], StepTimeSource]
    seed: int = 0
    router: Callable[[random.Random], Router] = LeastLoaded
    roles: Sequence[Role] = ()
    pools: Callable[[random.Random], PoolPolicy] | None = None
    weather: Weather = field(default_factory=Weather)
    faults: FaultSchedule = field(default_factory=FaultSchedule)
    gateway: dict[str, Any] = field(default_factory=dict)
    network_bytes_per_s: float = 12.5e9
    clock_spread_s: float = 1000.0
    patience_s: Callable[[int], float | None] = lambda index: None
    check: bool = False
    sample_every_s: float = 1.0

    def instance_of(self, index: int) -> InstanceSpec:
        if not self.roles:
            return self.instance
        return replace(self.instance, engine=self.instance.engine.model_copy(update={"role": self.roles[index]}))


class Fleet:
    """One run. Everything random comes from the seed, each user of random numbers with a stream of its own, so that a
    change in one place does not move all others."""

    def __init__(self, spec: FleetSpec, decisions: TextIO | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.log = DecisionLog(loop.time, decisions)
        self.fabric = Fabric(self._rng("fabric"), Weather(**vars(spec.weather)))
        gateway_node = Node(-1, spec.network_bytes_per_s)
        clocks = self._rng("clocks")
        self.store = _make_store(spec.instance)
        self.launchers = [
            SimulatedLauncher(
                Node(index, spec.network_bytes_per_s, clocks.uniform(0.0, spec.clock_spread_s)),
                gateway_node,
                self.fabric,
                spec.instance_of(index),
                spec.times(self._rng(f"steps/{index}")),
                self._rng(f"incarnations/{index}"),
                self.log,
                self._on_launch,
                self.store,
            )
            for index in range(spec.instances)
        ]
        self.timeline = Timeline(self.launchers)
        self.slo: list[tuple[float, SloSnapshot]] = []
        self.injector = FaultInjector(spec.faults, self.launchers, self.fabric, self.log.note, self.store)
        self.gateway = Gateway(
            self.launchers,
            rng=self._rng("gateway"),
            router=spec.router(self._rng("router")),
            pools=None if spec.pools is None else spec.pools(self._rng("pools")),
            on_route=self._on_route,
            **spec.gateway,
        )
        self._loop = loop

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.spec.seed}/{name}")

    def _on_launch(self, instance: SimulatedInstance) -> None:
        self.timeline.instances.append(instance)
        self.log.note("launch", instance.node.index)

    def _on_route(self, request_id: str, attempt: int, slot: int) -> None:
        self.log.note("route", request_id, attempt, slot)

    async def run(
        self, samples: Sequence[Sample], source: TokenSource, on_progress: Progress = lambda now, done, total: None
    ) -> FleetResult:
        """Serve all samples. Raises AssertionError when something is lost or repeated, Stuck."""
        began = time.perf_counter()
        await self.gateway.start()
        await self._all_ready()
        vocab_size = self.spec.instance.vocab_size
        clients = Clients(self.gateway, samples, source, vocab_size, self.log, self.spec.patience_s)
        start = self._loop.time()
        side = [
            asyncio.create_task(self._watch(start, clients, len(samples), on_progress), name="timeline"),
            asyncio.create_task(self.injector.run(), name="faults"),
        ]
        sending = asyncio.create_task(clients.run(), name="clients")
        try:
            await asyncio.wait((sending, side[0]), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                side[0].result()  # raises
            sending.result()
        finally:
            for task in (sending, *side):
                task.cancel()
            await asyncio.gather(sending, *side, return_exceptions=True)
        simulated = self._loop.time() - start
        self.timeline.take(simulated)
        counters, tiers = self.timeline.counters, self.timeline.tier_counts
        cache_gaps = 0 if self.gateway.directory is None else self.gateway.directory.num_gaps
        await self._settle()
        return FleetResult(
            outcomes=clients.outcomes,
            samples=self.timeline.samples,
            slo=self.slo,
            decision_hash=self.log.digest(),
            simulated_s=simulated,
            wall_s=time.perf_counter() - began,
            steps=self.timeline.steps,
            gpus=self.spec.instances,
            restarts=self.gateway.restarts,
            preemptions=counters.preemptions,
            yields=counters.yields,
            most_yields=self.timeline.most_yields,
            quota_tokens=counters.quota_tokens,
            overtakes=counters.overtakes,
            chunk_tokens=self.spec.instance.engine.chunk_tokens,
            hits=hits_by_tier(counters),
            tiers=tiers,
            wasted=counters.wasted,
            faults=self.injector.happened,
            cache_gaps=cache_gaps,
        )

    async def _all_ready(self) -> None:
        """Load starts when the whole fleet is there, however long each start takes."""
        for launcher in self.launchers:
            await launcher.up.wait()
        await asyncio.sleep(1.0)  # their Hello is on its way

    async def _watch(self, start: float, clients: Clients, total: int, on_progress: Progress) -> None:
        ended, since = -1, self._loop.time()
        while True:
            now = self._loop.time()
            self.timeline.take(now - start)
            self.slo.append((now - start, self.gateway.slo_snapshot()))
            on_progress(now - start, clients.ended, total)
            if self.spec.check:
                self.check()
            if clients.ended != ended or not self.gateway.in_flight:
                ended, since = clients.ended, now
            elif now - since > STUCK_S:
                raise Stuck(f"{self.gateway.in_flight} requests are in flight and none has ended for {STUCK_S:.0f} s")
            await asyncio.sleep(self.spec.sample_every_s)

    def check(self) -> None:
        """The books of the gateway and of every living instance."""
        self.gateway.check()
        for launcher in self.launchers:
            instance = launcher.current
            if instance is not None and instance.alive and instance.scheduler is not None:
                instance.scheduler.check()
                if instance.tiers is not None:
                    instance.tiers.check()

    async def _settle(self) -> None:
        """Faults end; what instances still hold for requests that have ended is given back; then all stop."""
        self.injector.end_all()
        self.check()
        await self.gateway.drain(timeout=60.0)
        for instance in self.timeline.instances:
            if instance.scheduler is not None and instance.ended_well:
                instance.scheduler.check()
                assert instance.scheduler.num_unfinished == 0, "an instance holds a request that has ended"
                assert instance.scheduler.kv.clear(), "an instance holds blocks for nobody"
            if instance.tiers is not None:
                await _check_empty(instance.tiers)


async def _check_empty(tiers: TieredCache) -> None:
    """However the instance ended, every slot of its L2 is free or holds a block that nobody uses."""
    tiers.check()
    await tiers.clear(store=False)
    assert tiers.snapshot().l2_blocks == 0, "slots of L2 are held for nobody"


def _make_store(instance: InstanceSpec) -> SimulatedStore | None:
    if instance.engine.l3 is None:
        return None
    assert instance.tiers is not None
    return SimulatedStore(instance.tiers.page_bytes, instance.engine.l3_capacity)


def run_fleet(
    spec: FleetSpec,
    samples: Sequence[Sample],
    source: TokenSource,
    *,
    decisions: TextIO | None = None,
    on_progress: Progress = lambda now, done, total: None,
) -> FleetResult:
    """Simulate in a loop of its own."""

    async def main() -> FleetResult:
        return await Fleet(spec, decisions).run(samples, source, on_progress)

    return run(main())
