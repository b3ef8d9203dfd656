"""Gateways and one instance's Peers channel within this process."""

from __future__ import annotations

import asyncio
import itertools

from kllm.messages import Down, Up
from kllm.transport.link import LinkClosed
from kllm.transport.memory import MemoryLink, memory_pair
from kllm.transport.peers import PeerKey


class MemoryPeers:
    """Peers over memory links: each `connect` is a gateway's connection, as a dialled one. Made inside a loop."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._keys = itertools.count()
        self._links: dict[PeerKey, MemoryLink[Down, Up]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._arrived: asyncio.Queue[tuple[PeerKey, Down] | None] = asyncio.Queue()
        self.closed = False

    def connect(self) -> MemoryLink[Up, Down]:
        """The gateway's end."""
        near, far = memory_pair(self._capacity)
        if self.closed:
            far.close()
            return near
        key = str(next(self._keys)).encode()
        self._links[key] = far
        reader = asyncio.ensure_future(self._read(key, far))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return near

    async def _read(self, key: PeerKey, link: MemoryLink[Down, Up]) -> None:
        try:
            while True:
                self._arrived.put_nowait((key, await link.recv()))
        except LinkClosed:
            pass

    def send(self, peer: PeerKey, message: Up) -> None:
        if self.closed:
            raise LinkClosed("closed")
        self._links[peer].send(message)

    async def recv(self) -> tuple[PeerKey, Down]:
        arrived = await self._arrived.get()
        if arrived is None:
            raise LinkClosed("closed")
        return arrived

    def close(self) -> None:
        self.closed = True
        for link in self._links.values():
            link.close()
        for reader in self._readers:
            reader.cancel()
        self._arrived.put_nowait(None)
