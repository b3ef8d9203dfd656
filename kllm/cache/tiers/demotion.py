"""Demotion: copies blocks downwards, L1 to L2 to L3, in the background and never at anybody's expense.

A block of L1 is not pinned while it is copied. Afterwards it is looked at again: if the device block was given away
meanwhile, the copy is thrown away. So a copy never keeps memory from a request, and needs no lock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from kllm.cache.events import BlockStored, EventSink, Medium
from kllm.cache.manager import KVManager
from kllm.cache.tiers.host_pool import HostBlock, HostPool
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.store_link import StoreLink
from kllm.telemetry.tier_counts import TierCounts

BATCH_BYTES = 16 << 20
MOST_BLOCKS = 64  # of a batch: bounds what the bookkeeping of one batch takes from the step loop


class Demotion:
    """Two loops on the event loop's thread: save (L1 to L2) and persist (L2 to L3)."""

    def __init__(
        self,
        kv: KVManager,
        pool: HostPool,
        mover: PageMover,
        link: StoreLink | None,
        settings: TierSettings,
        counts: TierCounts,
        sink: EventSink,
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._mover = mover
        self._link = link
        self._settings = settings
        self._counts = counts
        self._sink = sink
        self._asked: OrderedDict[bytes, None] = OrderedDict()  # to be saved before all others
        self._to_save: OrderedDict[bytes, None] = OrderedDict()
        self._to_persist: OrderedDict[bytes, None] = OrderedDict()
        self._used: deque[bytes] = deque()  # to be counted
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._wake_save = asyncio.Event()
        self._wake_persist = asyncio.Event()
        self._settled = asyncio.Event()
        self._busy = 0
        pool.on_room = self._wake_save.set
        self.batch = max(1, min(MOST_BLOCKS, BATCH_BYTES // mover.page_bytes, pool.num_slots // 4))

    # -- what happens on the device --------------------------------------------------------------------------

    def computed(self, hashes: Sequence[bytes]) -> None:
        """Blocks that are new in L1."""
        if self._settings.write == "through":
            self._save_later(hashes)
        self._wake_save.set()

    def asked(self, hashes: Sequence[bytes]) -> None:
        """Others are to pull these: they are copied before all others, whatever the settings say."""
        for block_hash in hashes:
            if block_hash not in self._pool:
                self._asked[block_hash] = None
        self._wake_save.set()

    def used(self, hashes: Iterable[bytes]) -> None:
        """A request found these in the cache."""
        self._used.extend(hashes)
        self._wake_save.set()

    def _count_uses(self, hashes: Iterable[bytes]) -> None:
        uses, settings = self._uses, self._settings
        for block_hash in hashes:
            count = uses.pop(block_hash, 1) + 1
            uses[block_hash] = count
            block = self._pool.get(block_hash)
            if block is None and settings.write == "selective" and count >= settings.min_reuse:
                self._save_later([block_hash])  # this loop saves next
            elif block is not None and block.ready:
                self._persist_later([block])
        while len(uses) > 2 * (self._pool.num_slots + self._kv.pool.num_blocks):
            uses.popitem(last=False)

    def _save_later(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            if block_hash not in self._pool:
                self._to_save[block_hash] = None

    # -- L1 to L2 --------------------------------------------------------------------------------------------

    async def save_loop(self) -> None:
        while True:
            while self._used:
                self._count_uses([self._used.popleft() for _ in range(min(MOST_BLOCKS, len(self._used)))])
                await asyncio.sleep(0)  # a long prompt's many blocks must not hold up a step
            hashes = self._next_to_save()
            if not hashes:
                self._settled.set()
                self._wake_save.clear()
                await self._wake_save.wait()
                continue
            await self.save(hashes)

    def _next_to_save(self) -> list[bytes]:
        """Blocks that L1 has and L2 has not: those that are to be copied, and those that L1 evicts next."""
        kv, pool = self._kv, self._pool
        if not pool.available:
            return []  # they wait: the pool says when there is room
        hashes = self._take(self._asked)
        if hashes:
            return hashes
        if self._settings.staging and len(self._to_persist) >= pool.num_slots // 2 and self._store_keeps_up:
            return hashes  # persist_loop says when there is room again
        hashes = self._take(self._to_save)
        if not hashes and self._settings.saves_coldest and kv.pool.num_free < 2 * self.batch:
            # Those in the window must fit into L2 together: else saving one would push out another, for ever.
            coldest = kv.coldest(min(4 * self.batch, (pool.available + 1) // 2))
            hashes = [block_hash for block_hash in coldest if block_hash not in pool][: self.batch]
        return hashes

    def _take(self, queue: OrderedDict[bytes, None]) -> list[bytes]:
        """The next batch of those that L1 has and L2 has not."""
        hashes: list[bytes] = []
        while queue and len(hashes) < self.batch:
            block_hash, _ = queue.popitem(last=False)
            if block_hash not in self._pool and self._kv.block_of(block_hash) is not None:
                hashes.append(block_hash)
        return hashes

    async def save(self, hashes: list[bytes]) -> None:
        """Copy these, which L1 has and L2 has not. Those that there is no room for, or that L1 gives up meanwhile, are
        not in L2 afterwards."""
        self._busy += 1
        try:
            await self._save(hashes)
        finally:
            self._busy -= 1

    async def _save(self, hashes: list[bytes]) -> None:
        kv, pool = self._kv, self._pool
        slots = pool.reserve(hashes)
        self._counts.saves_dropped += len(hashes) - len(slots)
        if not slots:
            return
        blocks = [kv.block_of(slot.hash) for slot in slots]
        present = [block for block in blocks if block is not None]
        assert len(present) == len(slots), "looked up a moment ago"
        versions = [kv.version(block) for block in present]
        try:
            await self._mover.save(present, [slot.slot for slot in slots])
        except BaseException:
            await self._mover.idle()  # it may still write into the slots
            pool.discard(slots)
            raise
        same = [
            kv.block_of(slot.hash) == block and kv.version(block) == version
            for slot, block, version in zip(slots, present, versions, strict=True)
        ]
        kept = [slot for slot, valid in zip(slots, same, strict=True) if valid]
        pool.discard(slot for slot, valid in zip(slots, same, strict=True) if not valid)
        pool.publish(kept)
        self._counts.saves_dropped += len(slots) - len(kept)
        self._counts.saved += len(kept)
        self._counts.bytes_saved += len(kept) * self._mover.page_bytes
        if kept:
            self._sink(BlockStored([slot.hash for slot in kept], None, (), kv.block_tokens, Medium.HOST))
            self._persist_later(kept)

    @property
    def _store_keeps_up(self) -> bool:
        return self._link is not None and self._link.writable

    # -- L2 to L3 --------------------------------------------------------------------------------------------

    def _persist_later(self, blocks: Iterable[HostBlock]) -> None:
        if self._link is None:
            return
        for block in blocks:
            if not block.stored and self._uses.get(block.hash, 1) >= self._settings.store_min_reuse:
                self._to_persist[block.hash] = None
        self._wake_persist.set()

    async def persist_loop(self) -> None:
        while True:
            batch = self._next_to_persist()
            if not batch:
                self._settled.set()
                self._wake_persist.clear()
                await self._wake_persist.wait()
                continue
            self._busy += 1
            try:
                await self._persist(batch)
            finally:
                self._busy -= 1
                self._pool.unpin(batch, spent=self._settings.staging)
            if self._settings.staging:
                self._wake_save.set()

    def _next_to_persist(self) -> list[HostBlock]:
        """Blocks that are still in L2, pinned."""
        batch: list[HostBlock] = []
        while self._to_persist and len(batch) < self.batch:
            block = self._pool.get(self._to_persist.popitem(last=False)[0])
            if block is None or not block.ready:
                self._counts.stores_dropped += 1
            elif not block.stored:
                batch.append(block)
        self._pool.pin(batch)
        return batch

    async def _persist(self, batch: list[HostBlock]) -> None:
        link = self._link
        assert link is not None
        written = None
        if link.writable:
            written = await link.put([block.hash for block in batch], [self._mover.page(b.slot) for b in batch])
        if written is None:
            self._counts.stores_dropped += len(batch)
            await asyncio.sleep(0)  # all that waits may go this way, and must not hold up a step
            return
        for block in batch:
            block.stored = True
        self._counts.stored += written
        self._counts.bytes_stored += written * self._mover.page_bytes
        hashes = [block.hash for block in batch]
        self._sink(BlockStored(hashes, None, (), self._kv.block_tokens, Medium.STORAGE))

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Something is on its way down."""
        waking = self._wake_save.is_set() or (self._link is not None and self._wake_persist.is_set())
        return bool(waking or self._busy or self._asked or self._to_save or self._to_persist)

    async def settled(self) -> None:
        """Returns when nothing is."""
        while self.behind:
            self._settled.clear()
            await self._settled.wait()

    def forget(self) -> None:
        """The cache is cleared: nothing that waits is copied any more."""
        self._asked.clear()
        self._to_save.clear()
        self._to_persist.clear()
        self._used.clear()
        self._uses.clear()
