"""SimulatedTransfer: pages from the host memory of one simulated instance into that of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kllm.cache.transfer.port import TransferError
from kllm.simulation.decision_log import DecisionLog
from kllm.simulation.node import Node, Port
from kllm.simulation.node_work import NodeWork
from kllm.simulation.page_mover import SimulatedPageMover


@dataclass
class _Memory:
    """What others can reach: the slots of one process, through a port of its machine's."""

    node: Node
    work: NodeWork
    mover: SimulatedPageMover
    egress: Port

    @property
    def answers(self) -> bool:
        return self.node.powered and not self.node.unreachable and not self.node.frozen


class TransferNetwork:
    """The memories that can be reached now, by address."""

    def __init__(self) -> None:
        self.memories: dict[str, _Memory] = {}
        self._joined = 0

    def join(
        self,
        node: Node,
        work: NodeWork,
        mover: SimulatedPageMover,
        bytes_per_s: float,
        latency_s: float,
        log: DecisionLog | None = None,
    ) -> SimulatedTransfer:
        """The transfer of a process that has just started."""
        self._joined += 1
        address = f"simulated:{self._joined}"
        memory = self.memories[address] = _Memory(node, work, mover, Port(bytes_per_s))
        return SimulatedTransfer(self, address, memory, Port(bytes_per_s), latency_s, log)


class SimulatedTransfer:
    """The KvTransfer port. Pages leave through a port of the owner's machine and come in through one of the reader's,
    both at once and each at its speed, and take latency_s besides. What is read is what the slots hold at the end.

    An owner that has ended refuses; one that stands still, is off or is cut off does not answer: the reader waits for
    as long as it likes."""

    def __init__(
        self,
        network: TransferNetwork,
        address: str,
        own: _Memory,
        ingress: Port,
        latency_s: float,
        log: DecisionLog | None,
    ) -> None:
        self.address = address
        self._network = network
        self._own = own
        self._ingress = ingress
        self._latency_s = latency_s
        self._log = log
        self._loop = asyncio.get_running_loop()

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        own, now = self._own, self._loop.time()
        until = now + timeout_s
        peer = self._network.memories.get(address)
        arrival = now + self._latency_s
        if peer is not None and peer.answers:
            size = len(mine) * own.mover.page_bytes
            arrival += max(peer.egress.pass_through(now, size), self._ingress.pass_through(now, size)) - now
        if not await own.work.until(min(arrival, until), remote=True):
            raise TransferError("the reader has ended")
        if peer is None or (peer.answers and peer.work.over):
            raise TransferError("the peer has ended")
        if arrival > until or not peer.answers:
            await own.work.until(until, remote=True)
            raise TransferError(f"not all has come within {timeout_s:.2g} s")
        for slot, page in zip(mine, theirs, strict=True):
            own.mover.page(slot)[:] = peer.mover.page(page)
        if self._log is not None:
            self._log.note("pull", own.node.index, peer.node.index, len(mine))

    async def close(self) -> None:
        self._network.memories.pop(self.address, None)
