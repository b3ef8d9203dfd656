"""Faults: what goes wrong when, as a value. One seed, one schedule; its text form reproduces a run by one command.

12.5 crash 2; 30 slow 1 for 20 by 4; 41.25 weather for 10 by 0.05; 60 store-gone for 5

crash      the instance's process ends; its machine stays
power      the machine is off `for` seconds: nothing is said, not even that the link ended
hang       the process is stopped `for` seconds; it neither sends nor receives nor computes, then goes on
stall      the accelerator never completes the steps it has; the process lives
slow       steps take `by` times as long, `for` seconds
partition  the machine is cut off from all others `for` seconds; it works on
weather    every link loses, repeats and reorders messages with probability `by`, `for` seconds
skew       the machine's clock is set by `by` seconds
store-full the store (L3) takes nothing new, `for` seconds
store-slow its calls take `by` times as long, `for` seconds
store-gone its calls fail, `for` seconds; then it is back with what it held
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kllm.simulation.fabric import Fabric, Weather
from kllm.simulation.launcher import SimulatedLauncher
from kllm.simulation.store import SimulatedStore

Kind = Literal[
    "crash",
    "power",
    "hang",
    "stall",
    "slow",
    "partition",
    "weather",
    "skew",
    "store-full",
    "store-slow",
    "store-gone",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
STORE_KINDS: tuple[Kind, ...] = ("store-full", "store-slow", "store-gone")
_STORELESS_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in STORE_KINDS)
_EVERYWHERE = ("weather", *STORE_KINDS)  # they hit no node of their own
_LASTING = ("power", "hang", "slow", "partition", "weather", *STORE_KINDS)
_MEASURED = ("slow", "weather", "skew", "store-slow")
_FAULT = re.compile(
    r"(?P<at>[0-9.]+) (?P<kind>[a-z-]+)(?: (?P<node>[0-9]+))?(?: for (?P<for>[0-9.]+))?(?: by (?P<by>-?[0-9.]+))?"
)
MAX_FAULTS = 10_000


class FaultError(ValueError):
    """A schedule that cannot be read; the message names the fault."""


@dataclass(frozen=True)
class Fault:
    """at_s: after the start of the run. node: the instance it hits (weather and the store's hit all). Other fields: see
    above."""

    at_s: float
    kind: Kind
    node: int = 0
    for_s: float = 0.0
    by: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_s:.12g} {self.kind}"]
        if self.kind not in _EVERYWHERE:
            parts.append(f"{self.node}")
        if self.kind in _LASTING:
            parts.append(f"for {self.for_s:.12g}")
        if self.kind in _MEASURED:
            parts.append(f"by {self.by:.12g}")
        return " ".join(parts)


@dataclass(frozen=True)
class FaultSchedule:
    """Faults in the order of their times. str() is its text; `parse` reads that."""

    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))

    @classmethod
    def parse(cls, text: str, instances: int) -> FaultSchedule:
        """Raises FaultError."""
        parts = [part.strip() for part in text.split(";") if part.strip()]
        if len(parts) > MAX_FAULTS:
            raise FaultError(f"{len(parts)} faults are more than {MAX_FAULTS}")
        return cls(tuple(sorted((_parse_fault(part, instances) for part in parts), key=lambda fault: fault.at_s)))

    @classmethod
    def random(
        cls, seed: int, instances: int, horizon_s: float, mean_faults: float = 4.0, *, store: bool = False
    ) -> FaultSchedule:
        """About `mean_faults` faults within `horizon_s` seconds. store: the fleet has one, which fails too."""
        rng = random.Random(f"faults/{seed}")
        kinds = KINDS if store else _STORELESS_KINDS
        faults: list[Fault] = []
        now = 0.0
        while len(faults) < MAX_FAULTS:
            now += rng.expovariate(mean_faults / horizon_s)
            if now >= horizon_s:
                break
            faults.append(_draw_fault(rng, kinds, round(now, 3), instances, horizon_s))
        return cls(tuple(faults))

    @property
    def needs_store(self) -> bool:
        """Some of them are a store's."""
        return any(fault.kind in STORE_KINDS for fault in self.faults)


def _draw_fault(rng: random.Random, kinds: Sequence[Kind], at_s: float, instances: int, horizon_s: float) -> Fault:
    kind = rng.choice(kinds)
    node = 0 if kind in _EVERYWHERE else rng.randrange(instances)
    for_s = round(rng.uniform(0.02, 0.4) * horizon_s, 3) if kind in _LASTING else 0.0
    by = {"slow": rng.uniform(2.0, 20.0), "weather": rng.uniform(0.005, 0.1), "skew": rng.uniform(-3600.0, 3600.0)}
    if kind == "store-slow":
        by[kind] = rng.uniform(30.0, 300.0)
    return Fault(at_s, kind, node, for_s, round(by.get(kind, 0.0), 4))


def _parse_fault(text: str, instances: int) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None or match["kind"] not in KINDS:
        raise FaultError(f"{text!r} is not a fault such as '12.5 crash 2' or '30 slow 1 for 20 by 4'")
    kind = match["kind"]
    try:
        fault = Fault(
            float(match["at"]), kind, int(match["node"] or 0), float(match["for"] or 0), float(match["by"] or 0)
        )
    except ValueError:
        raise FaultError(f"{text!r} has a number that cannot be read") from None
    if fault.node >= instances:
        raise FaultError(f"{text!r}: there is no instance {fault.node}, only 0 to {instances - 1}")
    if kind in _LASTING and fault.for_s <= 0:
        raise FaultError(f"{text!r}: {kind} lasts some time: add 'for SECONDS'")
    if (kind in ("slow", "store-slow") and fault.by <= 0) or (kind == "weather" and not 0 < fault.by <= 1):
        raise FaultError(f"{text!r}: 'by' is a factor above 0 for slow and store-slow, a probability for weather")
    return fault


class FaultInjector:
    """Carries a schedule out. store: the fleet's; needed where the schedule needs it. `happened`: what was injected so
    far, one line each."""

    def __init__(
        self,
        schedule: FaultSchedule,
        launchers: Sequence[SimulatedLauncher],
        fabric: Fabric,
        note: Callable[[str, str], None],
        store: SimulatedStore | None = None,
    ) -> None:
        assert store is not None or not schedule.needs_store
        self._store = store
        self.happened: list[str] = []
        self._schedule = schedule
        self._launchers = launchers
        self._fabric = fabric
        self._note = note
        self._calm = Weather(**vars(fabric.weather))
        self._endings: dict[str, int] = {}  # how many faults of a kind last on a node

    async def run(self) -> None:
        """Inject all; ends with the last fault's beginning."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for fault in self._schedule.faults:
            await asyncio.sleep(max(0.0, start + fault.at_s - loop.time()))
            self.happened.append(str(fault))
            self._note("fault", str(fault))
            self._begin(fault)

    def end_all(self) -> None:
        """The world is whole again."""
        for fault in self._schedule.faults:
            if fault.kind in _LASTING:
                self._endings[self._key(fault)] = 1
                self._end(fault)

    def _key(self, fault: Fault) -> str:
        return f"{fault.kind} {fault.node}"

    def _begin(self, fault: Fault) -> None:
        launcher = self._launchers[fault.node]
        node, instance = launcher.node, launcher.current
        match fault.kind:
            case "crash" if instance is not None:
                instance.kill("crashed")
            case "stall" if instance is not None and instance.executor is not None:
                instance.executor.hung = True
            case "power":
                node.power_off()
                if instance is not None:
                    instance.kill("its machine lost power", silently=True)
            case "hang":
                node.freeze()
            case "slow":
                node.slow = fault.by
            case "partition":
                node.cut_off()
            case "skew":
                node.skew(fault.by)
            case "weather":
                weather = self._fabric.weather
                weather.loss = weather.duplicate = weather.reorder = fault.by
            case "store-full" | "store-slow" | "store-gone":
                self._set_store(fault.kind, by=fault.by)
        if fault.kind in _LASTING:
            self._endings[self._key(fault)] = self._endings.get(self._key(fault), 0) + 1
            asyncio.get_running_loop().call_later(fault.for_s, self._end, fault)

    def _end(self, fault: Fault) -> None:
        """The last of overlapping faults of one kind ends it."""
        left = self._endings[self._key(fault)] = max(0, self._endings.get(self._key(fault), 0) - 1)
        if left:
            return
        node = self._launchers[fault.node].node
        match fault.kind:
            case "power":
                node.power_on()
            case "hang":
                node.thaw()
            case "slow":
                node.slow = 1.0
            case "partition":
                node.reconnect()
            case "weather":
                for name, value in vars(self._calm).items():
                    setattr(self._fabric.weather, name, value)
            case "store-full" | "store-slow" | "store-gone":
                self._set_store(fault.kind, by=None)

    def _set_store(self, kind: Kind, by: float | None) -> None:
        """by: None ends the fault."""
        store = self._store
        assert store is not None
        match kind:
            case "store-full":
                store.full = by is not None
            case "store-slow":
                store.slow = 1.0 if by is None else by
            case "store-gone":
                store.gone = by is not None
