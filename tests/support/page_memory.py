"""Pages in plain memory: a device and a host pool that a PageMover copies between, and a store that can misbehave."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from kllm.cache.block_hash import chain, root_hash
from kllm.cache.stores.store import StoreCounts, StoreError

PAGE_BYTES = 16


def contents(fingerprint: str, tokens: array[int], block_tokens: int, salt: str = "") -> list[bytes]:
    """What the pages of these tokens must hold: a function of the whole prefix, as KV is."""
    width = block_tokens * tokens.itemsize
    raw = tokens.tobytes()
    blocks = [raw[i : i + width] for i in range(0, len(raw) - width + 1, width)]
    return chain(root_hash("contents" + fingerprint, salt), blocks)


class MemoryMover:
    """The PageMover port over bytearrays. A copy takes delay() seconds, and reads its source at the end of them: the
    worst case for whoever changes it meanwhile."""

    def __init__(self, num_blocks: int, num_slots: int, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.page_bytes = PAGE_BYTES
        self.device = [bytearray(PAGE_BYTES) for _ in range(num_blocks)]
        self.host = [bytearray(PAGE_BYTES) for _ in range(num_slots)]
        self._delay = delay
        self._running: set[asyncio.Task[None]] = set()

    def page(self, slot: int) -> memoryview:
        return memoryview(self.host[slot])

    async def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        await self._begin(self.device, list(blocks), self.host, list(slots))

    async def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        await self._begin(self.host, list(slots), self.device, list(blocks))

    async def _begin(
        self, source: list[bytearray], places: list[int], target: list[bytearray], onto: list[int]
    ) -> None:
        async def copy() -> None:
            await asyncio.sleep(self._delay())
            for place, to in zip(places, onto, strict=True):
                target[to][:] = source[place]

        task = asyncio.ensure_future(copy())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def idle(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running))


class DictStore:
    """The Store port over a dict, which may be shared. delay(): seconds a call takes. broken: it raises StoreError."""

    def __init__(self, pages: dict[bytes, bytes] | None = None, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.pages = {} if pages is None else pages
        self.counts = StoreCounts()
        self.broken = False
        self.full = False
        self.calls = 0
        self._delay = delay

    async def _call(self) -> None:
        self.calls += 1
        await asyncio.sleep(self._delay())
        if self.broken:
            raise StoreError("the store is broken")

    async def exists(self, keys: Sequence[bytes]) -> int:
        await self._call()
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        await self._call()
        there = [key in self.pages for key in keys]
        for key, page, found in zip(keys, into, there, strict=True):
            page[:] = self.pages[key] if found else b"\xff" * PAGE_BYTES
        return there

    async def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        await self._call()
        if self.full:
            raise StoreError("the store is full")
        new = [(key, bytes(page)) for key, page in zip(keys, pages, strict=True) if key not in self.pages]
        self.pages.update(new)
        return len(new)

    async def clear(self) -> None:
        await self._call()
        self.pages.clear()

    async def idle(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.idle()
