"""Outbox: what the adapter says to its gateway, in order, as fast as the gateway takes it."""

from __future__ import annotations

import asyncio

from kllm.messages import Deltas, Down, Up
from kllm.request import Delta
from kllm.transport.link import Backpressure, Link

PAUSE_S = 0.01  # while the gateway does not keep up


class Outbox:
    """Deltas that wait together go as one message, as those of one step do."""

    def __init__(self, link: Link[Down, Up]) -> None:
        self._link = link
        self._waiting: list[Delta | Up] = []
        self._filled = asyncio.Event()

    def put(self, item: Delta | Up) -> None:
        self._waiting.append(item)
        self._filled.set()

    async def run(self) -> None:
        """Sends until it is cancelled. Raises LinkClosed."""
        while True:
            await self._filled.wait()
            await self.flush()

    async def flush(self) -> None:
        """Sends all that waits. Raises LinkClosed."""
        self._filled.clear()
        waiting, self._waiting = self._waiting, []
        deltas: list[Delta] = []
        for item in waiting:
            if isinstance(item, Delta):
                deltas.append(item)
                continue
            if deltas:
                await self._send(Deltas(items=deltas))
                deltas = []
            await self._send(item)
        if deltas:
            await self._send(Deltas(items=deltas))

    async def _send(self, message: Up) -> None:
        while True:
            try:
                return self._link.send(message)
            except Backpressure:
                await asyncio.sleep(PAUSE_S)
