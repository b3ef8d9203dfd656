"""StoreLink: a store as the tiers use it. Errors and slowness make it pause; they never reach a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kllm.cache.stores.store import Store, StoreError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LATE_IN_A_ROW = 3  # lookups or fetches that were not answered in time, before the store is left alone
READS_AT_ONCE = 4

T = TypeVar("T")


class _Gate:
    """Whether one direction (reading or writing) may be tried: after a failure not for a while, each time longer."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0
        self._failed = False

    @property
    def open(self) -> bool:
        return not self._failed or self._clock() >= self._until

    @property
    def failed(self) -> bool:
        """It failed last, whether or not it may be tried again."""
        return self._failed

    def shut(self, why: str) -> None:
        if not self._failed:
            logger.warning("KV store: %s fails, going on without it: %s", self.name, why)
        self._failed = True
        self._until = self._clock() + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        if self._failed:
            logger.warning("KV store: %s works again", self.name)
        self._failed = False
        self._pause_s = FIRST_PAUSE_S


class StoreLink:
    """clock: seconds on a steady clock. The keys of its store: block hash, group 0, fingerprint."""

    def __init__(self, store: Store, fingerprint: str, clock: Callable[[], float]) -> None:
        self.store = store
        self.errors = 0
        self.held = False  # nothing is written for the time being
        self._suffix = b"\0" + bytes.fromhex(fingerprint)
        self._reading = _Gate("reading", clock)
        self._writing = _Gate("writing", clock)
        self._late = 0
        self._slots = asyncio.Semaphore(READS_AT_ONCE)

    @property
    def readable(self) -> bool:
        return self._reading.open

    @property
    def writable(self) -> bool:
        return self._writing.open and not self.held

    @property
    def down(self) -> bool:
        return self._reading.failed or self._writing.failed

    def late(self) -> None:
        """It did not answer before somebody's deadline."""
        self._late += 1
        if self._late >= LATE_IN_A_ROW:
            self._late = 0
            self._reading.shut(f"{LATE_IN_A_ROW} answers in a row came too late")

    async def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks are there; 0 when it cannot be asked."""
        async with self._slots:
            return await self._guard(self._reading, self.store.exists(self._keys(hashes))) or 0

    async def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        async with self._slots:
            got = await self._guard(self._reading, self.store.get(self._keys(hashes), into))
        return [False] * len(hashes) if got is None else got

    async def put(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> int | None:
        """Blocks written; None if it failed."""
        return await self._guard(self._writing, self.store.put(self._keys(hashes), pages))

    async def clear(self) -> None:
        """Raises StoreError."""
        await self.store.clear()

    def _keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [block_hash + self._suffix for block_hash in hashes]

    async def _guard(self, gate: _Gate, call: Awaitable[T]) -> T | None:
        try:
            answer = await call
        except StoreError as error:
            self.errors += 1
            gate.shut(str(error))
            return None
        gate.succeeded()
        self._late = 0
        return answer
