"""Timeline: the state of every instance at regular moments of simulated time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from kllm.cluster.slot import add_counters
from kllm.messages import EngineLoad
from kllm.simulation.launcher import SimulatedInstance, SimulatedLauncher
from kllm.simulation.results import InstanceSample
from kllm.telemetry.tier_counts import OF_THE_MOMENT, TierCounts


class _Meter:
    """Counters of one incarnation and its executor at the last sample."""

    def __init__(self) -> None:
        self.instance: SimulatedInstance | None = None
        self.busy_s = 0.0
        self.steps = self.rows = self.tokens = 0
        self.load = EngineLoad()


def hits_by_tier(load: EngineLoad) -> tuple[int, int, int]:
    """Tokens found in the KV cache that were there before the request came, that came from L2, and from L3."""
    return load.prefix_hits - load.l2_hits - load.l3_hits, load.l2_hits, load.l3_hits


class Timeline:
    """Looks at the instances themselves, not at what they report: a report is late, and lost with its instance.

    steps, counters: totals over all incarnations seen. most_yields: of one request."""

    def __init__(self, launchers: Sequence[SimulatedLauncher]) -> None:
        self.samples: list[InstanceSample] = []
        self.instances: list[SimulatedInstance] = []  # every incarnation, filled by the launchers
        self._launchers = launchers
        self._meters = [_Meter() for _ in launchers]
        self._last_s = 0.0

    @property
    def steps(self) -> int:
        return sum(instance.executor.steps for instance in self.instances if instance.executor is not None)

    @property
    def counters(self) -> EngineLoad:
        loads = [load for instance in self.instances if (load := _load(instance)) is not None]
        return functools.reduce(add_counters, loads, EngineLoad())

    @property
    def tier_counts(self) -> TierCounts | None:
        """Totals over all incarnations, and what is of the moment over those that live. None: no lower tiers."""
        total = self.counters.tiers
        if total is None:
            return None
        alive = [launcher.current for launcher in self._launchers]
        now = [one.tiers.snapshot() for one in alive if one is not None and one.alive and one.tiers is not None]
        moment = {name: sum(getattr(counts, name) for counts in now) for name in OF_THE_MOMENT}
        return msgspec.structs.replace(total, **moment)

    @property
    def most_yields(self) -> int:
        return max((i.scheduler.most_yields for i in self.instances if i.scheduler is not None), default=0)

    def take(self, now_s: float) -> None:
        for launcher, meter in zip(self._launchers, self._meters, strict=True):
            self.samples.append(self._sample(now_s, launcher, meter))
        self._last_s = now_s

    def _sample(self, now_s: float, launcher: SimulatedLauncher, meter: _Meter) -> InstanceSample:
        instance = launcher.current
        index = launcher.node.index
        if instance is None or not instance.alive or instance.executor is None or instance.scheduler is None:
            return InstanceSample(now_s, index, False, 0, 0, 0.0, 0.0, 0.0, 0.0)
        executor, load = instance.executor, instance.scheduler.load()
        if meter.instance is not instance:
            meter.instance, meter.busy_s, meter.steps, meter.rows, meter.tokens = instance, 0.0, 0, 0, 0
            meter.load = EngineLoad()
        steps = executor.steps - meter.steps
        busy = min(1.0, (executor.busy_s - meter.busy_s) / max(now_s - self._last_s, 1e-9))
        rows, tokens = executor.rows - meter.rows, executor.tokens - meter.tokens
        meter.busy_s, meter.steps, meter.rows, meter.tokens = (
            executor.busy_s,
            executor.steps,
            executor.rows,
            executor.tokens,
        )
        before, meter.load = meter.load, load
        l1, l2, l3 = (now - then for now, then in zip(hits_by_tier(load), hits_by_tier(before), strict=True))
        return InstanceSample(
            now_s,
            index,
            True,
            load.running,
            load.waiting,
            load.kv_usage,
            busy,
            rows / steps if steps else 0.0,
            tokens / steps if steps else 0.0,
            load.prefix_queries - before.prefix_queries,
            (l1, l2, l3),
        )


def _load(instance: SimulatedInstance) -> EngineLoad | None:
    if instance.scheduler is None or instance.tiers is None:
        return None if instance.scheduler is None else instance.scheduler.load()
    return msgspec.structs.replace(instance.scheduler.load(), tiers=instance.tiers.snapshot())
