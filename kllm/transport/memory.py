"""A link within one process: for tests, for simulation, and for an instance that shares the gateway's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic

from kllm.messages import Down, Message, Up
from kllm.transport.link import Backpressure, In, LinkClosed, Out


class MemoryLink(Generic[In, Out]):
    """One end of a pair made by `memory_pair`. Messages are handed over as they are: senders must not change them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inbox: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._peer: MemoryLink[Message, Message] | None = None

    def send(self, message: Out) -> None:
        peer = self._peer
        if self._closed or peer is None or peer._closed:
            raise LinkClosed("the link is closed")
        if len(peer._inbox) >= peer._capacity:
            raise Backpressure(f"{len(peer._inbox)} messages wait to be received")
        peer._inbox.append(message)
        peer._wake()

    async def recv(self) -> In:
        if self._waiter is not None:
            raise RuntimeError("recv is already waiting on this link")
        while not self._closed and not self._inbox:
            if self._peer is None or self._peer._closed:
                raise LinkClosed("the peer closed the link")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._closed:
            raise LinkClosed("the link is closed")
        return self._inbox.popleft()  # type: ignore[return-value]  # the peer's Out is our In

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        self._wake()
        if self._peer is not None:
            self._peer._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def memory_pair(capacity: int = 1024) -> tuple[MemoryLink[Up, Down], MemoryLink[Down, Up]]:
    """(the gateway's end, the instance's end). capacity: messages that may wait in each direction."""
    gateway: MemoryLink[Up, Down] = MemoryLink(capacity)
    instance: MemoryLink[Down, Up] = MemoryLink(capacity)
    gateway._peer = instance  # type: ignore[assignment]
    instance._peer = gateway  # type: ignore[assignment]
    return gateway, instance
