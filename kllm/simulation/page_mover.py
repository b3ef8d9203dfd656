"""SimulatedPageMover: copies between L1 and L2 that take time and move nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.node import Node
from kllm.simulation.node_work import NodeWork

STAMP_BYTES = 8


class SimulatedPageMover:
    """The PageMover port: one copy at a time, in the order of the calls, each latency_s + bytes / bytes_per_s seconds.

    work: that of the process whose memory it is. num_slots: of slots whose pages others may read. Such a page is a
    number that is another one after every copy into its slot, so that the reader's checksum notices; else it is empty.
    """

    def __init__(
        self,
        node: Node,
        work: NodeWork,
        page_bytes: int,
        bytes_per_s: float,
        latency_s: float,
        log: DecisionLog | None = None,
        num_slots: int = 0,
    ) -> None:
        self.page_bytes = page_bytes
        self._node = node
        self._work = work
        self._page_s = page_bytes / bytes_per_s
        self._latency_s = latency_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._pages = memoryview(bytearray(STAMP_BYTES * num_slots))
        self._copies = 0

    def page(self, slot: int) -> memoryview:
        return self._pages[slot * STAMP_BYTES : (slot + 1) * STAMP_BYTES]

    async def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        await self._copy("save", blocks, slots)
        if self._pages:
            for slot in slots:
                self._copies += 1
                self.page(slot)[:] = self._copies.to_bytes(STAMP_BYTES, "little")

    async def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        await self._copy("load", slots, blocks)

    async def idle(self) -> None:
        await self._work.until(self._free_at)

    async def _copy(self, what: str, source: Sequence[int], target: Sequence[int]) -> None:
        if self._log is not None:
            self._log.note(what, self._node.index, source, target)
        start = max(self._loop.time(), self._free_at)
        self._free_at = start + self._latency_s + len(source) * self._page_s
        await self._work.until(self._free_at)
