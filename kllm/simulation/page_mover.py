"""SimulatedPageMover: copies between L1 and L2 that take time and move nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.node import Node
from kllm.simulation.node_work import NodeWork


class SimulatedPageMover:
    """The PageMover port: one copy at a time, in the order of the calls, each latency_s + bytes / bytes_per_s seconds.

    work: that of the process whose memory it is."""

    def __init__(
        self,
        node: Node,
        work: NodeWork,
        page_bytes: int,
        bytes_per_s: float,
        latency_s: float,
        log: DecisionLog | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self._node = node
        self._work = work
        self._page_s = page_bytes / bytes_per_s
        self._latency_s = latency_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._nothing = memoryview(b"")

    def page(self, slot: int) -> memoryview:
        """Empty: there are no bytes."""
        return self._nothing

    async def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        await self._copy("save", blocks, slots)

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
