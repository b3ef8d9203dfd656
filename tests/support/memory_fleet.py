"""Instances that outlive their gateways, without sockets: a scripted instance behind an Exchange."""

from __future__ import annotations

import asyncio

from support.lossy_link import LossyLink, Weather
from support.memory_peers import MemoryPeers
from support.scripted_instance import HELLO, Faults, ScriptedInstance

from kllm.cluster.launchers.launcher import LaunchError, VisitingLauncher
from kllm.messages import Down, Hello, Ping, Up
from kllm.transport.exchange import Exchange
from kllm.transport.exchange_link import ExchangeLink
from kllm.transport.link import Backpressure, Link, LinkClosed


class Host:
    """A place where instances run, one at a time. Each start is a new incarnation."""

    def __init__(self, name: str, hello: Hello = HELLO, *, lease_reports: int = 30, capacity: int = 1024) -> None:
        self.name = name
        self.faults = Faults()
        self.starts = 0
        self.peers: MemoryPeers | None = None
        self.script: ScriptedInstance
        self.link: ExchangeLink
        self._hello = hello
        self._lease_reports = lease_reports
        self._capacity = capacity
        self._task: asyncio.Task[None] | None = None

    def start(self, start_s: float = 0.0) -> None:
        self.starts += 1
        self.peers = MemoryPeers(self._capacity)
        self.link = ExchangeLink(self.peers, Exchange(self._lease_reports))
        hello = Hello(**{name: getattr(self._hello, name) for name in self._hello.__struct_fields__} | {
            "instance_id": self.name, "incarnation": f"{self.name}-{self.starts}",
        })  # fmt: skip
        self.script = ScriptedInstance(self.link, self.faults, hello, start_s)
        self._task = asyncio.ensure_future(self.script.main())

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.link.close()
            await asyncio.sleep(0)
            self.peers = self._task = None

    async def ended(self) -> None:
        """Waits until the instance has ended by itself."""
        assert self._task is not None
        await self._task
        await asyncio.sleep(0)
        self.peers = self._task = None


class _Way(LossyLink[Up, Down]):
    """A gateway's end. While the weather is cut nothing passes, either way: not even its close."""

    async def recv(self) -> Up:
        while True:
            message = await self._inner.recv()
            if not self._weather.cut:
                return message

    def close(self) -> None:
        if not self._weather.cut:
            super().close()


class _Visit:
    """The Instance port over one connection."""

    def __init__(self, link: Link[Up, Down], inner: Link[Up, Down]) -> None:
        self.link = link
        self.inner = inner
        self._over = asyncio.Event()

    async def wait(self) -> str:
        await self._over.wait()  # the end of the link says it all
        return "left"

    async def stop(self, grace_s: float) -> None:
        self.link.close()
        self._over.set()


class Visitor(VisitingLauncher):
    """A gateway's way to a host. weather: between the two."""

    def __init__(self, host: Host) -> None:
        self.address = host.name
        self.host = host
        self.weather = Weather()
        self.visits: list[_Visit] = []

    async def launch(self) -> _Visit:
        if self.host.peers is None or self.weather.cut:
            raise LaunchError(f"nobody answers at {self.address}")
        inner = self.host.peers.connect()
        visit = _Visit(_Way(inner, self.weather), inner)
        self.visits.append(visit)
        try:
            inner.send(Ping())
        except (LinkClosed, Backpressure) as error:
            raise LaunchError(f"nobody answers at {self.address}") from error
        return visit

    def hang_up(self) -> None:
        """The gateway's process dies: no last words."""
        for visit in self.visits:
            visit.inner.close()
