"""Instances that were started elsewhere (`kllm instance`) and listen for gateways. Nothing is started here: `launch`
visits one, and what it finds there, if anything, is an incarnation like any other.
"""

from __future__ import annotations

from kllm.cluster.launchers.launcher import LaunchError, VisitingLauncher
from kllm.messages import Down, Ping, Up
from kllm.transport.addresses import need_key, normalize
from kllm.transport.fleet_key import FleetKey
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.zeromq import ZmqLink, dial_instance


class RemoteInstance:
    """One connection. When it ends, so does this incarnation, as far as this gateway is concerned: whoever answers next
    may be another process, and the instance aborts what it had for a gateway whose connection has ended."""

    def __init__(self, link: ZmqLink[Up, Down]) -> None:
        self.link = link

    async def wait(self) -> str:
        await self.link.peer_gone()
        return f"no instance answers at {self.link.address}, or its connection has ended"

    async def stop(self, grace_s: float) -> None:
        """Leaves it: the instance is not ours to end."""
        self.link.close()


class RemoteLauncher(VisitingLauncher):
    """address: tcp://HOST:PORT or ipc:///PATH. key: of the fleet. Raises AddressError."""

    def __init__(self, address: str, key: FleetKey | None = None) -> None:
        self.address = normalize(address)
        need_key(self.address, has_key=key is not None)
        self._key = key

    async def launch(self) -> RemoteInstance:
        try:
            link = dial_instance(self.address, self._key)
        except OSError as error:
            raise LaunchError(f"cannot dial the instance: {error.strerror}") from error
        try:
            link.send(Ping())  # it learns of a gateway by its first message, and answers with Hello
        except (LinkClosed, Backpressure) as error:
            link.close()
            raise LaunchError(f"no instance answers at {self.address}") from error
        return RemoteInstance(link)
