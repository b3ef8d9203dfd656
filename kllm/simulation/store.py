"""SimulatedStore: the L3 of a fleet, and StoreHandle, through which an instance uses it. Keys only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from kllm.cache.stores.store import StoreCounts, StoreError
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.node import Node, Port
from kllm.simulation.node_work import NodeWork


class SimulatedStore:
    """Which pages there are, least recently used out first, and how the store is.

    slow: factor on the duration of calls. full: nothing can be written. gone: no call succeeds; what it holds is still
    there when it comes back.
    """

    def __init__(self, page_bytes: int, capacity_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.slow = 1.0
        self.full = False
        self.gone = False
        self._most_pages = capacity_bytes // page_bytes
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Pages."""
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def read(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are there; they are the most recently used now, the first most of all: a prefix outlives what
        continues it."""
        there = [key in self._keys for key in keys]
        for key, found in zip(reversed(keys), reversed(there), strict=True):
            if found:
                self._keys.move_to_end(key)
        return there

    def add(self, keys: Sequence[bytes]) -> int:
        """Pages given up to make room for these."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        evicted = max(0, len(self._keys) - self._most_pages)
        for _ in range(evicted):
            self._keys.popitem(last=False)
        return evicted

    def clear(self) -> None:
        self._keys.clear()


class StoreHandle:
    """The Store port of one instance. A call takes latency_s, and bytes / bytes_per_s after those of earlier calls:
    reads and writes share the instance's way to the store. A written page is there when its call returns.

    work: that of the instance's process, with which calls end.
    """

    def __init__(
        self,
        store: SimulatedStore,
        node: Node,
        work: NodeWork,
        bytes_per_s: float,
        latency_s: float,
        log: DecisionLog | None = None,
    ) -> None:
        self.counts = StoreCounts()  # evicted: for what this instance wrote
        self._store = store
        self._node = node
        self._work = work
        self._way = Port(bytes_per_s)
        self._latency_s = latency_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._stamps = 0

    async def exists(self, keys: Sequence[bytes]) -> int:
        await self._exchange(0)
        found = self._store.leading(keys)
        self._note("exists", len(keys), found)
        return found

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        there = self._store.read(keys)
        pages = sum(there)
        await self._exchange(pages)
        for page, found in zip(into, there, strict=True):
            if page and found:  # simulated bytes, which are others than those that were there
                self._stamps -= 1
                page[:] = self._stamps.to_bytes(len(page), "little", signed=True)
        self.counts.bytes_read += pages * self._store.page_bytes
        self._note("get", len(keys), pages)
        return there

    async def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        there = self._store.read(keys)
        new = [key for key, known in zip(keys, there, strict=True) if not known]
        await self._exchange(len(new))
        if self._store.full and new:
            self._note("put", len(keys), "full")
            raise StoreError("the store is full")
        written = sum(key not in self._store for key in new)  # others may have been quicker with some
        evicted = self._store.add(new)
        self.counts.evicted += evicted
        self.counts.bytes_written += written * self._store.page_bytes
        self._note("put", len(keys), written, evicted)
        return written

    async def clear(self) -> None:
        await self._exchange(0)
        self._store.clear()

    async def idle(self) -> None:
        """No call uses its caller's memory."""

    async def close(self) -> None:
        """There is nothing to close; idempotent."""

    async def _exchange(self, pages: int) -> None:
        """The time that a call takes. Raises StoreError."""
        store = self._store
        if not store.gone:
            sent = self._way.pass_through(self._loop.time(), round(pages * store.page_bytes * store.slow))
            if not await self._work.until(sent + self._latency_s * store.slow, remote=True):
                raise StoreError("the instance has ended")
        if store.gone:
            raise StoreError("the store is gone")

    def _note(self, what: str, *figures: object) -> None:
        if self._log is not None:
            self._log.note(what, self._node.index, *figures)
