"""A link within one process: for tests, for simulation, and for an instance that shares the gateway's loop."""

from __future__ import annotations

from typing import Generic

from kllm.messages import Down, Up
from kllm.transport.inbox import Inbox
from kllm.transport.link import Backpressure, In, LinkClosed, Out


class MemoryLink(Generic[In, Out]):
    """One end of a pair made by `memory_pair`. Messages are handed over as they are: senders must not change them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inbox = Inbox()
        self._peer: Inbox | None = None

    def send(self, message: Out) -> None:
        peer = self._peer
        if self._inbox.closed or peer is None or peer.closed:
            raise LinkClosed("the link is closed")
        if len(peer) >= self._capacity:
            raise Backpressure(f"{len(peer)} messages wait to be received")
        peer.put(message)

    async def recv(self) -> In:
        return await self._inbox.get()  # type: ignore[return-value]  # the peer's Out is our In

    def close(self) -> None:
        if not self._inbox.closed:
            self._inbox.close()
            if self._peer is not None:
                self._peer.end()


def memory_pair(capacity: int = 1024) -> tuple[MemoryLink[Up, Down], MemoryLink[Down, Up]]:
    """(the gateway's end, the instance's end). capacity: messages that may wait in each direction."""
    gateway: MemoryLink[Up, Down] = MemoryLink(capacity)
    instance: MemoryLink[Down, Up] = MemoryLink(capacity)
    gateway._peer, instance._peer = instance._inbox, gateway._inbox
    return gateway, instance
