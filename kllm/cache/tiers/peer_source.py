"""PeerSource: another instance's slots as a source of pages. What comes is verified; what fails is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kllm.cache.events import BlockStored, EventSink, Medium
from kllm.cache.tiers.checksum import page_checksums
from kllm.cache.tiers.host_pool import HostBlock, HostPool
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.prediction import Prediction
from kllm.cache.tiers.workers import Workers
from kllm.cache.transfer.port import KvTransfer, TransferError
from kllm.messages import KvSource
from kllm.telemetry.tier_counts import TierCounts

logger = logging.getLogger(__name__)


class PeerSource:
    def __init__(
        self,
        transfer: KvTransfer,
        pool: HostPool,
        mover: PageMover,
        workers: Workers,
        counts: TierCounts,
        prediction: Prediction,
        clock: Callable[[], float],
        block_tokens: int,
        sink: EventSink,
    ) -> None:
        self._transfer = transfer
        self._pool = pool
        self._mover = mover
        self._workers = workers
        self._counts = counts
        self._prediction = prediction
        self._clock = clock
        self._block_tokens = block_tokens
        self._sink = sink

    def fits(self, source: KvSource) -> bool:
        """Whether its pages may be read into slots of this instance."""
        return source.page_bytes == self._mover.page_bytes and len(source.slots) == len(source.checksums)

    async def pull(self, source: KvSource, wanted: Sequence[tuple[int, bytes]], timeout_s: float) -> bool:
        """Blocks (index in the prompt, name) into new slots of L2: the leading ones that there is room for and that
        come whole within timeout_s. Whether all that was asked for has come."""
        slots = self._pool.reserve([name for _, name in wanted])
        if not slots:
            return False
        asked = wanted[: len(slots)]
        began = self._clock()
        try:
            came = await self._read(source, [index for index, _ in asked], slots, timeout_s)
            good = await self._verified(source, asked, slots)
        except BaseException:
            self._pool.discard(slots)
            raise
        self._pool.discard(slots[good:])
        self._pool.publish(slots[:good])
        self._account(good, came, len(slots), self._clock() - began)
        if good:
            names = [slot.hash for slot in slots[:good]]
            self._sink(BlockStored(names, None, (), self._block_tokens, Medium.HOST))
        return came and good == len(slots)

    async def _read(self, source: KvSource, theirs: list[int], slots: list[HostBlock], timeout_s: float) -> bool:
        """Whether it went through; if not, some pages may have come all the same."""
        try:
            await self._transfer.read(
                source.address, [source.slots[index] for index in theirs], [slot.slot for slot in slots], timeout_s
            )
        except TransferError as error:
            logger.warning("KV of %s could not be pulled, it is computed again: %s", source.lease, error)
            return False
        return True

    async def _verified(self, source: KvSource, asked: Sequence[tuple[int, bytes]], slots: list[HostBlock]) -> int:
        """How many leading pages are what they should be."""
        pages = [self._mover.page(slot.slot) for slot in slots]
        sums = await self._workers.run(page_checksums, [name for _, name in asked], pages)
        for number, ((index, _), slot, checksum) in enumerate(zip(asked, slots, sums, strict=True)):
            if checksum != source.checksums[index]:
                return number
            slot.checksum = checksum
        return len(slots)

    def _account(self, good: int, came: bool, asked: int, seconds: float) -> None:
        counts = self._counts
        counts.pulled += good
        counts.bytes_pulled += good * self._mover.page_bytes
        counts.pull_s += seconds
        if good < asked or not came:
            counts.pull_failures += 1
        if came and good < asked:
            counts.pull_corrupt += 1
        if came:
            self._prediction.fetched("peer", asked, seconds)
