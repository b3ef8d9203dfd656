"""Exports: KV of a prompt, made ready in L2 for another instance to pull.

prefill runs    export_soon()   blocks are copied down as they are committed, so that little is left to do
prefill ends    export()        what is missing is copied; the leading whole blocks are pinned under a lease
elsewhere       the other instance reads the slots, unasked and unnoticed, and compares the checksums
release(), or the lease's time is over, or a newer export needs the room: the slots may be overwritten
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from kllm.cache.block_hash import chain_politely
from kllm.cache.manager import Holding, KVManager
from kllm.cache.tiers.checksum import page_checksums
from kllm.cache.tiers.demotion import Demotion
from kllm.cache.tiers.host_pool import HostBlock, HostPool
from kllm.cache.tiers.leases import Leases
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.workers import Workers
from kllm.messages import KvSource
from kllm.telemetry.tier_counts import TierCounts

FEW_BLOCKS = 128  # hashed at once on the loop; more go to a worker


class Exports:
    """address: where others reach the slots. clock: seconds on a steady clock. wake: called when the time of a lease is
    over."""

    def __init__(
        self,
        address: str,
        kv: KVManager,
        pool: HostPool,
        mover: PageMover,
        demotion: Demotion,
        workers: Workers,
        counts: TierCounts,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.leases = Leases(pool)
        self._address = address
        self._kv = kv
        self._pool = pool
        self._mover = mover
        self._demotion = demotion
        self._workers = workers
        self._counts = counts
        self._clock = clock
        self._wake = wake

    def soon(self, holding: Holding, first: int) -> int:
        """Copy down what the holding shares with the tree from block `first` on. The block to go on from."""
        self._demotion.asked(self._kv.shared_names(holding, first))
        return holding.shared

    async def export(self, tokens: array[int], salt: str, adapter: str, lease: str, lease_s: float) -> KvSource | None:
        """See TieredCache.export."""
        began = self._clock()
        hashes = await self._names(tokens, salt, adapter)
        leases = self.leases
        leases.expire(self._clock())
        leases.open(lease, began + lease_s)
        try:
            await self._pin(lease, hashes[: leases.most])
            blocks = leases.blocks(lease)
            await self._add_checksums(blocks)
        except BaseException:
            leases.release([lease])
            raise
        if not blocks or lease not in leases:  # revoked meanwhile: the room was needed
            leases.release([lease])
            return None
        asyncio.get_running_loop().call_later(lease_s, self._expire)
        self._counts.exports += 1
        self._counts.exported += len(blocks)
        self._counts.export_s += self._clock() - began
        return KvSource(
            lease=lease,
            address=self._address,
            page_bytes=self._mover.page_bytes,
            slots=[block.slot for block in blocks],
            checksums=[block.checksum or 0 for block in blocks],
        )

    def _expire(self) -> None:
        self.leases.expire(self._clock())
        self._wake()  # whoever looked at the leases before may have let it go

    async def _names(self, tokens: array[int], salt: str, adapter: str) -> list[bytes]:
        """Of the whole blocks of these tokens."""
        kv = self._kv
        holding = kv.open(salt, adapter)
        try:
            kv.match(holding, tokens, len(tokens))
            names, parent = kv.shared_names(holding), kv.last_hash(holding)
            first, last = holding.shared, len(tokens) // kv.block_tokens
            if last - first <= FEW_BLOCKS:
                return names + kv.hashes_after(holding, tokens, last)
        finally:
            kv.close(holding)
        raw = tokens[first * kv.block_tokens : last * kv.block_tokens].tobytes()
        return names + await self._workers.run(chain_politely, parent, raw, kv.block_tokens * tokens.itemsize)

    async def _pin(self, lease: str, hashes: list[bytes]) -> None:
        """Under the lease, the leading blocks that L1 or L2 has, and for which there is room."""
        size = self._demotion.batch
        for start in range(0, len(hashes), size):
            batch = hashes[start : start + size]
            blocks = await self._bring_down(lease, batch)
            if self.leases.add(lease, blocks) < start + len(batch):
                return

    async def _bring_down(self, lease: str, hashes: list[bytes]) -> list[HostBlock]:
        """The leading blocks of these in L2, ready, those that are on their way there included."""
        pool, kv = self._pool, self._kv
        there = next(
            (i for i, name in enumerate(hashes) if name not in pool and kv.block_of(name) is None), len(hashes)
        )
        hashes = hashes[:there]
        self.leases.make_room(lease, hashes)
        present = [block for name in hashes if (block := pool.get(name)) is not None]
        pool.pin(present)
        try:
            await self._demotion.save([name for name in hashes if name not in pool])
            await pool.arrived(present)
        finally:
            pool.unpin(present)
        return pool.leading_ready(hashes)

    async def _add_checksums(self, blocks: list[HostBlock]) -> None:
        lacking = [block for block in blocks if block.checksum is None]
        if not lacking:
            return
        hashes, pages = [block.hash for block in lacking], [self._mover.page(block.slot) for block in lacking]
        sums = await self._workers.run(page_checksums, hashes, pages)
        for block, checksum in zip(lacking, sums, strict=True):
            block.checksum = checksum
