"""The PageMover port: copies pages between the device's blocks (L1) and the slots of a host pool (L2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PageMover(Protocol):
    """Copies run off the event loop's thread, in the order of the calls. A page in a slot is canonical bytes:

        for each record, for each of its layers: [block_tokens // stride, *shape] of its dtype

    Cancelling a call does not stop the copy: `idle()` returns when nothing that was begun runs any more.
    """

    page_bytes: int

    def page(self, slot: int) -> memoryview:
        """The memory of a slot, writable."""
        ...

    async def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """blocks[i] of L1 to slots[i] of L2."""
        ...

    async def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """slots[i] of L2 to blocks[i] of L1."""
        ...

    async def idle(self) -> None: ...
