"""The Store port: L3, where blocks outlive an instance and are shared between instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class StoreError(RuntimeError):
    """The store cannot do it now (full, gone, read-only, broken). Never a miss; the message is for the operator."""


class StoreCounts(msgspec.Struct):
    """What a store has noticed since it was opened; reported as metrics."""

    corrupt: int = 0  # pages whose checksum was wrong: dropped, never returned
    evicted: int = 0  # pages given up for room
    bytes_read: int = 0
    bytes_written: int = 0


class Store(Protocol):
    """Pages by key, all of one size, in batches. Every method may be called while others run; none blocks the loop.

    key: content hash of the block, then its group and the layout's fingerprint (see TieredCache).
    Pages are copied out of or into the caller's memory, which must stay as it is until the call returns. A call that is
    cancelled still uses that memory: `idle()` returns when nothing that was begun does any more.
    Errors: StoreError, and nothing else, for everything that an operator could mend.
    """

    counts: StoreCounts

    async def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are there."""
        ...

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fill `into` with the pages of these keys. False: it is not there (any more) or its checksum is wrong, and the
        contents of that page are undefined."""
        ...

    async def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Keep these pages; those that are there already are skipped. Returns how many were written. When it returns,
        they survive the death of every process."""
        ...

    async def clear(self) -> None:
        """Forget everything."""
        ...

    async def idle(self) -> None: ...

    async def close(self) -> None:
        """Waits for what runs; idempotent."""
        ...
