"""Staging: brings blocks into L2 from where they are, another instance's L2 or the store, on their way to L1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kllm.cache.events import BlockStored, EventSink, Medium
from kllm.cache.tiers.host_pool import HostPool
from kllm.cache.tiers.lookup import Lookup, Staged
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.peer_source import PeerSource
from kllm.cache.tiers.prediction import Prediction, Source
from kllm.cache.tiers.store_link import StoreLink
from kllm.telemetry.tier_counts import TierCounts


class Staging:
    """link: the store, peer: the way to other instances; None where there is none."""

    def __init__(
        self,
        pool: HostPool,
        mover: PageMover,
        link: StoreLink | None,
        peer: PeerSource | None,
        counts: TierCounts,
        prediction: Prediction,
        clock: Callable[[], float],
        block_tokens: int,
        sink: EventSink,
    ) -> None:
        self._pool = pool
        self._mover = mover
        self._link = link
        self._peer = peer
        self._counts = counts
        self._prediction = prediction
        self._clock = clock
        self._block_tokens = block_tokens
        self._sink = sink

    async def stage(self, lookup: Lookup, hashes: Sequence[bytes], first: int) -> Staged:
        """The leading blocks of these in L2, pinned: those that are there, and those that still can be had. first:
        index in the prompt of the first one."""
        pool = self._pool
        absent = [(first + i, name) for i, name in enumerate(hashes) if name not in pool]
        present = [block for name in hashes if (block := pool.get(name)) is not None]
        pool.pin(present)
        try:
            came = await self._bring(lookup, absent)
            await pool.arrived(present)
        finally:
            pool.unpin(present)
        staged = pool.leading_ready(hashes)
        pool.pin(staged)
        return Staged(staged, came)

    async def _bring(self, lookup: Lookup, absent: list[tuple[int, bytes]]) -> dict[bytes, Source]:
        """Where those that L2 lacks are to come from: one after the other, as they are needed in order."""
        at_peer = [(index, name) for index, name in absent if index < lookup.at_peer]
        others = [name for index, name in absent if index >= lookup.at_peer]
        came: dict[bytes, Source] = {name: "peer" for _, name in at_peer}
        if at_peer and not await self._pull(lookup, at_peer):
            return came
        others = [name for name in others if name not in self._pool]  # some may have come meanwhile
        if others:
            came.update((name, "l3") for name in others)
            await self._read(others)
        return came

    async def _pull(self, lookup: Lookup, wanted: list[tuple[int, bytes]]) -> bool:
        """Whether all came. After a failure this lookup does not ask the other instance again."""
        source, peer = lookup.source, self._peer
        if source is None or peer is None:
            return False
        complete = await peer.pull(source, wanted, max(0.0, lookup.deadline - self._clock()))
        if not complete:
            lookup.source = None
        return complete

    async def _read(self, hashes: list[bytes]) -> None:
        """From the store into new slots of L2."""
        if self._link is None or not self._link.readable:
            return
        slots = self._pool.reserve(hashes)
        if not slots:
            return
        began = self._clock()
        try:
            pages = [self._mover.page(slot.slot) for slot in slots]
            got = await self._link.get([slot.hash for slot in slots], pages)
        except BaseException:
            await self._link.store.idle()  # it may still write into the slots
            self._pool.discard(slots)
            raise
        ready = [slot for slot, there in zip(slots, got, strict=True) if there]
        self._pool.discard(slot for slot, there in zip(slots, got, strict=True) if not there)
        for slot in ready:
            slot.stored = True
        self._pool.publish(ready)
        seconds = self._clock() - began
        self._counts.fetched += len(ready)
        self._counts.bytes_fetched += len(ready) * self._mover.page_bytes
        self._counts.fetch_s += seconds
        if ready:
            self._prediction.fetched("l3", len(ready), seconds)
            self._sink(BlockStored([slot.hash for slot in ready], None, (), self._block_tokens, Medium.HOST))
