"""HostPool: which blocks lie in the slots of host memory (L2), and which of them goes when room is needed. No bytes.

    free ──reserve──► filling ──publish──► ready ──evict──► free
                         └──── discard ────────────────────► ▲

A filling slot is being written, by a copy from the device or by a read from the store; `arrival` tells who waits for
it. A pinned slot is being read and is not evicted.

Eviction is least recently used, among those first that nobody needs any more (spent), the oldest of them first: else a
block that has just been written down would be pushed out by the next, and look as if it had never been here. A block is
used when it comes, when it is brought up, and when the device evicts its
copy; hits on the device do not come this far. A run of blocks is touched from its end to its beginning, so that a
prefix outlives what continues it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class HostBlock:
    """A block in a slot. stored: the store has it too. checksum: of its bytes, once somebody needed it (page_checksum).
    arrival: done when it is ready or discarded (False)."""

    __slots__ = ("arrival", "checksum", "discarded", "hash", "pins", "ready", "slot", "stored")

    def __init__(self, block_hash: bytes, slot: int) -> None:
        self.hash = block_hash
        self.slot = slot
        self.pins = 0
        self.ready = False
        self.discarded = False
        self.stored = False
        self.checksum: int | None = None
        self.arrival: asyncio.Future[bool] | None = None

    def arrived(self) -> asyncio.Future[bool]:
        """Whether it became ready, once that is known."""
        if self.arrival is None:
            self.arrival = asyncio.get_running_loop().create_future()
            if self.ready or self.discarded:
                self.arrival.set_result(self.ready)
        return self.arrival


class HostPool:
    """num_slots: blocks of room. on_evict: told of blocks that went. on_room: called when a slot can be had again after
    none could."""

    def __init__(self, num_slots: int, on_evict: Callable[[list[bytes]], None] = lambda hashes: None) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: dict[bytes, HostBlock] = {}
        self._idle: OrderedDict[bytes, HostBlock] = OrderedDict()  # ready and not pinned, coldest first
        self._spent: OrderedDict[bytes, HostBlock] = OrderedDict()  # as well, and the first to go
        self._on_evict = on_evict
        self.on_room: Callable[[], None] = lambda: None
        self.num_evicted = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._blocks)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle) + len(self._spent)

    def get(self, block_hash: bytes) -> HostBlock | None:
        """The block, ready or on its way."""
        return self._blocks.get(block_hash)

    def ready(self) -> list[bytes]:
        """Names of all blocks whose bytes are there."""
        return [block.hash for block in self._blocks.values() if block.ready]

    def leading_ready(self, hashes: Iterable[bytes]) -> list[HostBlock]:
        """The blocks of the first hashes, as far as their bytes are here."""
        ready: list[HostBlock] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.ready:
                break
            ready.append(block)
        return ready

    async def arrived(self, blocks: Iterable[HostBlock]) -> None:
        """Waits until each of these is ready or discarded. They must be pinned."""
        for block in blocks:
            if not block.ready:
                await asyncio.wait([block.arrived()])  # others wait for it too: not to be cancelled

    def leading(self, hashes: Iterable[bytes]) -> int:
        """How many of the first hashes are here, ready or on their way."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._blocks:
                break
            count += 1
        return count

    # -- coming ----------------------------------------------------------------------------------------------

    def reserve(self, hashes: Sequence[bytes]) -> list[HostBlock]:
        """Slots for blocks that are not here, in order; fewer if there is not enough room. They are filling."""
        self._evict(len(hashes) - len(self._free))
        blocks = []
        for block_hash in hashes[: len(self._free)]:
            block = self._blocks[block_hash] = HostBlock(block_hash, self._free.pop())
            blocks.append(block)
        return blocks

    def publish(self, blocks: Sequence[HostBlock]) -> None:
        """Their bytes are there: filling -> ready."""
        before = self.available
        for block in reversed(blocks):
            block.ready = True
            self._settle(block, True)
            if not block.pins:
                self._idle[block.hash] = block
        if not before and self.available:
            self.on_room()

    def discard(self, blocks: Iterable[HostBlock]) -> None:
        """Their bytes will not come, or are worthless: filling -> free. Pins on them mean nothing any more."""
        before = self.available
        for block in blocks:
            del self._blocks[block.hash]
            self._free.append(block.slot)
            block.discarded = True
            self._settle(block, False)
        if not before and self.available:
            self.on_room()

    @staticmethod
    def _settle(block: HostBlock, ready: bool) -> None:
        if block.arrival is not None and not block.arrival.done():
            block.arrival.set_result(ready)

    # -- use -------------------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            block.pins += 1
            self._idle.pop(block.hash, None)
            self._spent.pop(block.hash, None)

    def unpin(self, blocks: Sequence[HostBlock], *, spent: bool = False) -> None:
        """Given back: they are the most recently used now. spent: and go before all that are not."""
        before, kept = self.available, self._spent if spent else self._idle
        for block in reversed(blocks):
            block.pins -= 1
            if block.ready and not block.pins:
                kept[block.hash] = block
        if not before and self.available:
            self.on_room()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """They have just lost their copy on the device, which gives up a prefix from its end: the first of them go
        first."""
        for block_hash in hashes:
            for kept in (self._idle, self._spent):
                if block_hash in kept:
                    kept.move_to_end(block_hash)

    # -- going -----------------------------------------------------------------------------------------------

    def _evict(self, wanted: int) -> None:
        self.num_evicted += self._give_up(wanted)

    def _give_up(self, wanted: int) -> int:
        gone: list[bytes] = []
        while len(gone) < wanted and (self._spent or self._idle):
            block_hash, block = (self._spent or self._idle).popitem(last=False)
            del self._blocks[block_hash]
            self._free.append(block.slot)
            gone.append(block_hash)
        if gone:
            self._on_evict(gone)
        return len(gone)

    def clear(self) -> None:
        """Give up everything that is neither filling nor pinned."""
        self._give_up(len(self._idle) + len(self._spent))

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one place."""
        slots = self._free + [block.slot for block in self._blocks.values()]
        assert sorted(slots) == list(range(self.num_slots))
        for block_hash, block in self._blocks.items():
            assert block.hash == block_hash
            assert block.pins >= 0
            assert (block_hash in self._idle) + (block_hash in self._spent) == (block.ready and not block.pins)
