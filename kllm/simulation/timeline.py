"""Timeline: the state of every instance at regular moments of simulated time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kllm.cluster.slot import add_counters
from kllm.messages import EngineLoad
from kllm.simulation.launcher import SimulatedInstance, SimulatedLauncher
from kllm.simulation.results import InstanceSample


class _Meter:
    """Counters of one incarnation's executor at the last sample."""

    def __init__(self) -> None:
        self.instance: SimulatedInstance | None = None
        self.busy_s = 0.0
        self.steps = self.rows = self.tokens = 0


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
        loads = [instance.scheduler.load() for instance in self.instances if instance.scheduler is not None]
        return functools.reduce(add_counters, loads, EngineLoad())

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
        steps = executor.steps - meter.steps
        busy = min(1.0, (executor.busy_s - meter.busy_s) / max(now_s - self._last_s, 1e-9))
        rows, tokens = executor.rows - meter.rows, executor.tokens - meter.tokens
        meter.busy_s, meter.steps, meter.rows, meter.tokens = (
            executor.busy_s,
            executor.steps,
            executor.rows,
            executor.tokens,
        )
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
        )
