"""SimulatedLauncher: starts the production instance_main on a simulated node, phase by phase, and reports its life."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from kllm.cache.events import EventSink
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.config import EngineConfig
from kllm.costs.noise import StepTimeSource
from kllm.engine.assembly import host_slots, make_scheduler, put_tiers_below
from kllm.engine.cache_reports import CacheReporter
from kllm.engine.core import EngineCore
from kllm.engine.instance import instance_main
from kllm.messages import Down, Hello, Starting, Up
from kllm.scheduling.scheduler import Scheduler
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.executor import PlanningCost, SimulatedExecutor
from kllm.simulation.fabric import Fabric, FabricLink
from kllm.simulation.node import Node
from kllm.simulation.node_work import NodeWork
from kllm.simulation.page_mover import SimulatedPageMover
from kllm.simulation.store import SimulatedStore, StoreHandle
from kllm.simulation.workers import SimulatedWorkers
from kllm.transport.link import LinkClosed

NOTICE_S = 0.05  # from the end of a process to the launcher's knowing of it


@dataclass(frozen=True)
class TierSpeeds:
    """What an instance's way to its lower tiers is. page_bytes: of one KV block.

    host: copies between the accelerators' memory and the host's. store: calls of the instance to the store. transfer:
    pages of other instances.
    """

    page_bytes: int
    host_bytes_per_s: float
    host_latency_s: float
    store_bytes_per_s: float
    store_latency_s: float
    transfer_bytes_per_s: float = 12.5e9
    transfer_latency_s: float = 1e-4


@dataclass(frozen=True)
class InstanceSpec:
    """What every instance of a fleet is. engine: its knobs, the production ones.

    num_blocks: KV blocks of engine.block_size tokens. start_phases: (name, seconds), in order.
    top_k: tokens that attention is limited to (sparse attention). tiers: needed where the engine has lower tiers.
    """

    engine: EngineConfig
    num_blocks: int
    max_model_len: int
    vocab_size: int
    start_phases: tuple[tuple[str, float], ...]
    planning: PlanningCost
    top_k: int | None = None
    tiers: TierSpeeds | None = None


class SimulatedInstance:
    """One incarnation (the Instance port): a task on its node. `link` is the gateway's end. work: what its process
    waits for, besides messages and steps."""

    def __init__(self, node: Node, link: FabricLink[Up, Down], far: FabricLink[Down, Up]) -> None:
        self.node = node
        self.link = link
        self.scheduler: Scheduler | None = None  # once it has started
        self.executor: SimulatedExecutor | None = None
        self.tiers: TieredCache | None = None
        self.work = NodeWork(node)
        self.far = far
        self.life: asyncio.Task[None]
        self._reason = "the instance has ended"
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def begin(self, life: asyncio.Task[None]) -> None:
        self.life = life
        life.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        return not self.life.done()

    @property
    def ended_well(self) -> bool:
        """It has drained, or its gateway went away: it was not killed and did not fail."""
        return self.life.done() and not self.life.cancelled() and self.life.exception() is None

    def kill(self, reason: str, *, silently: bool = False) -> None:
        """The process ends at once. silently: with its machine, so that not even its link's end is seen."""
        self._reason = reason
        if silently:
            self.far.cut()
        self._terminate()

    def _terminate(self) -> None:
        self.work.end()
        self.life.cancel()

    def _on_end(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and life.exception() is not None:
            self._reason = f"the instance failed: {life.exception()}"
        self.far.close()
        asyncio.get_running_loop().call_later(NOTICE_S, self._notice)

    def _notice(self) -> None:
        if not self._gone.done():
            self._gone.set_result(f"{self.node.name}: {self._reason}")

    async def wait(self) -> str:
        reason = await asyncio.shield(self._gone)
        await self.node.usable()  # whoever watches a machine hears nothing from it while it is off or cut off
        return reason

    async def stop(self, grace_s: float) -> None:
        """The same as a signal: it can only be given where the machine can be reached. One that is leaving by itself
        gets grace_s seconds to do so."""
        self.link.close()
        await self.node.usable()
        if self.alive and self.far.inbox.closed:
            await asyncio.wait([self.life], timeout=grace_s)
        self._terminate()
        await asyncio.shield(self._gone)


class SimulatedLauncher:
    """The InstanceLauncher port. One per node; `current` is the latest incarnation.

    rng: draws incarnation ids. on_launch: told of every incarnation. store: the fleet's, if there is one."""

    def __init__(
        self,
        node: Node,
        gateway: Node,
        fabric: Fabric,
        spec: InstanceSpec,
        times: StepTimeSource,
        rng: random.Random,
        log: DecisionLog | None = None,
        on_launch: Callable[[SimulatedInstance], None] = lambda instance: None,
        store: SimulatedStore | None = None,
    ) -> None:
        self.node = node
        self.current: SimulatedInstance | None = None
        self.up = asyncio.Event()  # an incarnation was ready at least once
        self._gateway = gateway
        self._fabric = fabric
        self._spec = spec
        self._times = times
        self._rng = rng
        self._log = log
        self._on_launch = on_launch
        self._store = store
        self._fingerprint = hashlib.blake2b(spec.engine.model.encode(), digest_size=16).hexdigest()

    async def launch(self) -> SimulatedInstance:
        await self.node.usable()
        near, far = self._fabric.connect(self._gateway, self.node)
        instance = SimulatedInstance(self.node, near, far)
        self.current = instance
        instance.begin(asyncio.create_task(self._live(instance), name=self.node.name))
        self._on_launch(instance)
        return instance

    async def _live(self, instance: SimulatedInstance) -> None:
        spec, node = self._spec, self.node
        seconds = {}
        for name, duration in spec.start_phases:
            if not _tell(instance.far, Starting(phase=name)):
                return
            await asyncio.sleep(duration)
            seconds[name] = duration
        reporter = CacheReporter() if spec.engine.report_cache else None
        scheduler = make_scheduler(
            spec.engine,
            num_blocks=spec.num_blocks,
            max_model_len=spec.max_model_len,
            eos_token_ids=(),
            fingerprint=self._fingerprint,
            sink=reporter,
        )
        executor = SimulatedExecutor(
            node,
            self._times,
            vocab_size=spec.vocab_size,
            depth=spec.engine.pipeline_depth or 1,
            planning=spec.planning,
            top_k=spec.top_k,
            log=self._log,
        )
        instance.scheduler, instance.executor = scheduler, executor
        core, workers = EngineCore(scheduler, executor, node.clock), SimulatedWorkers()
        if spec.engine.stages:
            instance.tiers = self._put_tiers_below(core, workers, instance.work, reporter)
        hello = Hello(
            instance_id=node.name,
            incarnation=f"{self._rng.getrandbits(128):032x}",
            model=spec.engine.model,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            num_blocks=spec.num_blocks,
            block_tokens=spec.engine.block_size,
            chunk_tokens=spec.engine.chunk_tokens,
            max_num_seqs=spec.engine.max_num_seqs,
            start_seconds=seconds,
            operators="simulated",
            fingerprint=self._fingerprint if reporter is not None and spec.engine.enable_prefix_caching else "",
            role=spec.engine.role,
            transfers=spec.engine.kv_transfer != "off",
            page_bytes=spec.tiers.page_bytes if spec.tiers is not None else 0,
        )
        self.up.set()
        try:
            await instance_main(instance.far, core, None, workers, hello, reporter=reporter)
        finally:
            instance.work.end()
            if instance.tiers is not None:
                await instance.tiers.close()  # what was cut off in its last moments ends with the process

    def _put_tiers_below(
        self, core: EngineCore, workers: SimulatedWorkers, work: NodeWork, sink: EventSink | None
    ) -> TieredCache:
        engine, speeds, node, log = self._spec.engine, self._spec.tiers, self.node, self._log
        assert speeds is not None, "an instance with lower tiers needs their speeds"
        shared = 0 if engine.kv_transfer == "off" else host_slots(engine, speeds.page_bytes)
        mover = SimulatedPageMover(
            node, work, speeds.page_bytes, speeds.host_bytes_per_s, speeds.host_latency_s, log, shared
        )
        transfer = None
        if shared:
            network = self._fabric.transfers
            transfer = network.join(node, work, mover, speeds.transfer_bytes_per_s, speeds.transfer_latency_s, log)
        store = None
        if engine.l3 is not None:
            assert self._store is not None, "the fleet has no store"
            store = StoreHandle(self._store, node, work, speeds.store_bytes_per_s, speeds.store_latency_s, log)
        clock = asyncio.get_running_loop().time  # steady, as time.monotonic is: nobody can set it
        return put_tiers_below(core, engine, mover, store, self._fingerprint, workers, clock, sink, transfer)


def _tell(link: FabricLink[Down, Up], message: Up) -> bool:
    """Whether there is still somebody to tell."""
    try:
        link.send(message)
    except LinkClosed:
        return False
    return True
