"""Instances that exchange pages through plain memory: the KvTransfer port, which can be slow, broken and wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from support.page_memory import MemoryMover

from kllm.cache.transfer.port import TransferError


class MemoryNetwork:
    """delay(): seconds a read takes; the peer's pages are copied one by one during them. gone: addresses that cannot be
    reached. silent: those that do not answer. damage: called with each page that arrives."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.delay = delay
        self.gone: set[str] = set()
        self.silent: set[str] = set()
        self.damage: Callable[[bytearray], None] = lambda page: None
        self.movers: dict[str, MemoryMover] = {}

    def join(self, mover: MemoryMover) -> MemoryTransfer:
        address = f"memory:{len(self.movers)}"
        self.movers[address] = mover
        return MemoryTransfer(self, address)


class MemoryTransfer:
    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self.pages_read = 0
        self._network = network

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        network = self._network
        until = asyncio.get_running_loop().time() + timeout_s
        for peer_slot, slot in zip(theirs, mine, strict=True):
            await asyncio.sleep(network.delay() / len(mine))
            if address in network.gone or address not in network.movers:
                raise TransferError("the peer is gone")
            if address in network.silent or asyncio.get_running_loop().time() > until:
                await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
                raise TransferError("the time is over")
            page = network.movers[self.address].host[slot]
            page[:] = network.movers[address].host[peer_slot]
            network.damage(page)
            self.pages_read += 1

    async def close(self) -> None:
        self._network.movers.pop(self.address, None)
