"""TieredCache: L2 and L3 below the device's cache. Finds what a prompt has there and brings it up while it queues.

    lookup     L1 ─► L2 ─► L3      which leading blocks are where (asynchronous, with a deadline)
    decision   fetch the leading runs of blocks that are predicted to be cheaper fetched than computed
    fetch      L3 ─► slots of L2 ─► blocks of L1 ─► prefix tree, in batches; each is a hit as soon as it is there
    demotion   L1 ─► L2 ─► L3      (demotion.py)

Everything here runs on the instance's event loop, between steps, and only keeps books, a batch at a time. Bytes are
moved by the PageMover and the Store, on threads of their own. Blocks of L1 are taken only while a batch is copied into
them, and cached prefixes that a lookup holds on to are let go when a request needs the room (give_way).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from kllm.cache.block_hash import chain_politely
from kllm.cache.events import AllBlocksCleared, BlockRemoved, EventSink, Medium
from kllm.cache.manager import Holding, KVManager
from kllm.cache.tiers.demotion import Demotion
from kllm.cache.tiers.export import FEW_BLOCKS, Exports
from kllm.cache.tiers.host_pool import HostBlock, HostPool
from kllm.cache.tiers.lookup import Brought, Lookup, Staged
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.peer_source import PeerSource
from kllm.cache.tiers.prediction import Prediction, Source
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.staging import Staging
from kllm.cache.tiers.store_link import StoreLink
from kllm.cache.tiers.workers import Workers
from kllm.cache.transfer.port import KvTransfer
from kllm.messages import KvSource
from kllm.telemetry.tier_counts import TierCounts

logger = logging.getLogger(__name__)

CLEAR_GRACE_S = 1.0  # for copies that are on their way when the cache is cleared
RUN_BLOCKS = 512  # most blocks that are decided about together
T = TypeVar("T")


class TieredCache:
    """kv: L1's books; this becomes its `lower`. num_slots: blocks that L2 holds. link: the store, None without L3.
    transfer: gives and takes pages of L2 to and from other instances; None: there are no exports and no pulls.

    start() must be called on a running event loop. wake: called when something that the scheduler may wait for is over.
    """

    def __init__(
        self,
        kv: KVManager,
        num_slots: int,
        mover: PageMover,
        link: StoreLink | None,
        settings: TierSettings,
        workers: Workers,
        clock: Callable[[], float],
        sink: EventSink | None = None,
        transfer: KvTransfer | None = None,
    ) -> None:
        pool = HostPool(num_slots, self._evicted_below)
        self.counts = TierCounts(l2_capacity=num_slots)
        self.prediction = Prediction(mover.page_bytes, kv.block_tokens)
        self.wake: Callable[[], None] = lambda: None
        self._kv = kv
        self._pool = pool
        self._mover = mover
        self._link = link
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._sink: EventSink = sink or (lambda event: None)
        self._demotion = Demotion(kv, pool, mover, link, settings, self.counts, self._sink)
        self._transfer = transfer
        self._peer, self._exports = self._connect(transfer)
        self._staging = Staging(
            pool, mover, link, self._peer, self.counts, self.prediction, clock, kv.block_tokens, self._sink
        )
        self._lookups: dict[Lookup, None] = {}  # in the order in which they began
        self._arriving: dict[bytes, asyncio.Future[None]] = {}  # batches being copied into L1, by their first block
        self._tasks: set[asyncio.Task[Any]] = set()
        kv.lower = self

    def _connect(self, transfer: KvTransfer | None) -> tuple[PeerSource | None, Exports | None]:
        """Both directions of the way to other instances."""
        if transfer is None:
            return None, None
        kv, pool, mover, workers, counts, clock = (
            self._kv,
            self._pool,
            self._mover,
            self._workers,
            self.counts,
            self._clock,
        )
        peer = PeerSource(transfer, pool, mover, workers, counts, self.prediction, clock, kv.block_tokens, self._sink)
        exports = Exports(transfer.address, kv, pool, mover, self._demotion, workers, counts, clock, self._woken)
        return peer, exports

    def _woken(self) -> None:
        self.wake()

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn(self._demotion.save_loop())
        if self._link is not None:
            self._spawn(self._demotion.persist_loop())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop; what is on its way down gets `grace_s` seconds to arrive."""
        settled = self._spawn(self._demotion.settled())
        await asyncio.wait([settled], timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mover.idle()
        if self._exports is not None:
            self._exports.leases.clear()
        if self._transfer is not None:
            await self._transfer.close()
        if self._link is not None:
            await self._link.store.idle()
            await self._link.store.close()

    # -- what L1 tells (KVManager.lower) ---------------------------------------------------------------------

    @property
    def lending(self) -> bool:
        """Lookups hold blocks of L1, which they give back soon."""
        return bool(self._lookups)

    @property
    def copying(self) -> bool:
        """Blocks of L1 are being copied into."""
        return any(lookup.copying for lookup in self._lookups)

    def computed(self, hashes: Sequence[bytes]) -> None:
        self._demotion.computed(hashes)

    def used(self, hashes: list[bytes]) -> None:
        """A request that was admitted found these in L1."""
        self._demotion.used(hashes)

    @property
    def counts_uses(self) -> bool:
        """Whether it wants to be told what is used."""
        return self._settings.counts_uses

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """L1 gave them up: for L2 that is their last use."""
        counts = self.counts
        counts.l1_evicted += len(hashes)
        self._pool.touch(hashes)
        counts.l1_lost += sum(block_hash not in self._pool for block_hash in hashes)

    def holds(self, block_hash: bytes) -> bool:
        """L2 has it (what L3 has is not known without asking)."""
        block = self._pool.get(block_hash)
        return block is not None and block.ready

    def _evicted_below(self, hashes: list[bytes]) -> None:
        self._sink(BlockRemoved(hashes, Medium.HOST))

    def give_way(self) -> bool:
        """Let go of what lookups hold in L1, except where a copy runs. Whether that freed something."""
        idle = [lookup for lookup in self._lookups if lookup.holding is not None and not lookup.copying]
        for lookup in idle:
            self._let_go(lookup)
        return bool(idle)

    def _let_go(self, lookup: Lookup) -> None:
        if lookup.holding is not None:
            self._kv.close(lookup.holding)
            lookup.holding = None

    # -- lookup ----------------------------------------------------------------------------------------------

    def look_up(
        self,
        tokens: array[int],
        salt: str,
        adapter: str,
        done: Callable[[Brought], None],
        source: KvSource | None = None,
    ) -> asyncio.Task[None] | None:
        """Bring what lies below L1 of these tokens, all but the last one at most. `done` is called when L1 has what it
        will have, or the deadline has passed. None, and no call, if there is nothing to look for.

        source: where another instance has their leading blocks, which are pulled where L2 lacks them."""
        limit = len(tokens) - 1
        if limit < self._kv.block_tokens:
            return None
        holding = self._kv.open(salt, adapter)
        self._kv.match(holding, tokens, limit)
        if source is not None and (self._peer is None or not self._peer.fits(source)):
            self.counts.pull_failures += 1
            source = None
        lookup = Lookup(tokens, limit, holding, source)
        self.counts.lookup_tokens += (limit // self._kv.block_tokens - lookup.start) * self._kv.block_tokens
        if not self._promising(lookup):
            self._kv.close(holding)
            return None
        self._lookups[lookup] = None
        self.counts.lookups += 1
        self._set_deadline(lookup)
        task = self._spawn(self._run(lookup))
        task.add_done_callback(lambda _: self._end(lookup, done))  # also if it is cancelled before it began
        return task

    def _set_deadline(self, lookup: Lookup) -> None:
        missing = lookup.limit // self._kv.block_tokens - lookup.start
        kilotokens = missing * self._kv.block_tokens / 1000.0
        lookup.began = self._clock()
        allowed = self._settings.fetch_base_s + self._settings.fetch_per_kilotoken_s * kilotokens
        lookup.deadline = lookup.began + allowed

    def _promising(self, lookup: Lookup) -> bool:
        holding = lookup.holding
        assert holding is not None
        missing = lookup.limit // self._kv.block_tokens - lookup.start
        if missing <= 0:
            return False
        if lookup.at_peer > lookup.start:
            return True
        if self._link is not None and self._link.readable:
            return True
        return self._kv.hashes_after(holding, lookup.tokens, lookup.start + 1)[0] in self._pool

    async def _run(self, lookup: Lookup) -> None:
        try:
            await self._bring(lookup)
        except Exception:  # a bug here must not keep a request waiting: it computes what it did not get
            logger.exception("a cache lookup failed")

    def _end(self, lookup: Lookup, done: Callable[[Brought], None]) -> None:
        self._let_go(lookup)
        self._lookups.pop(lookup, None)
        self.counts.lookup_s += self._clock() - lookup.began
        done(lookup.brought)
        self.wake()

    async def _bring(self, lookup: Lookup) -> None:
        await self._name_blocks(lookup)
        runs = await self._find(lookup)
        found = sum(blocks for _, blocks in runs)
        wanted = self.prediction.worth(lookup.start, runs) if self._settings.predict else found
        self.counts.recomputed += found - wanted
        if wanted == 0:
            return
        await self._fetch(lookup, lookup.hashes[:wanted])

    async def _name_blocks(self, lookup: Lookup) -> None:
        holding = lookup.holding
        if holding is None:
            return
        last = lookup.limit // self._kv.block_tokens
        if last - lookup.start <= FEW_BLOCKS:
            lookup.hashes = self._kv.hashes_after(holding, lookup.tokens, last)
            return
        parent = self._kv.last_hash(holding)
        raw = lookup.tokens[lookup.start * self._kv.block_tokens : last * self._kv.block_tokens].tobytes()
        width = self._kv.block_tokens * lookup.tokens.itemsize
        lookup.hashes = await self._workers.run(chain_politely, parent, raw, width)

    async def _find(self, lookup: Lookup) -> list[tuple[Source, int]]:
        """Runs of blocks that are below, from the first that L1 lacks on."""
        hashes, pool, at_peer = lookup.hashes, self._pool, lookup.at_peer - lookup.start
        found = next((i for i, name in enumerate(hashes) if i >= at_peer and name not in pool), len(hashes))
        if found < len(hashes) and self._link is not None and self._link.readable:
            answer = await self._in_time(self._spawn(self._link.leading(hashes[found:])), lookup)
            if answer is None:
                self._link.late()
            found += answer or 0
        runs: list[tuple[Source, int]] = []
        for index, name in enumerate(hashes[:found]):
            source: Source = "l2" if name in pool else "peer" if index < at_peer else "l3"
            if runs and runs[-1][0] == source and runs[-1][1] < RUN_BLOCKS:
                runs[-1] = (source, runs[-1][1] + 1)
            else:
                runs.append((source, 1))
        return runs

    async def _in_time(self, task: asyncio.Future[T], lookup: Lookup) -> T | None:
        """The task's result if it comes before the lookup's deadline; the task goes on in any case."""
        done, _ = await asyncio.wait([task], timeout=max(0.0, lookup.deadline - self._clock()))
        if done:
            return task.result()
        self.counts.late += 1
        return None

    # -- fetch -----------------------------------------------------------------------------------------------

    async def _fetch(self, lookup: Lookup, hashes: list[bytes]) -> None:
        """Batch after batch: while one is copied into L1 the next is brought into L2."""
        size = self._demotion.batch
        starts = range(0, len(hashes), size)

        def stage(start: int) -> asyncio.Task[Staged]:
            return self._spawn(self._staging.stage(lookup, hashes[start : start + size], lookup.start + start))

        staging = deque([stage(0)])
        try:
            for start in starts:
                staging.extend(stage(following) for following in starts if following == start + size)
                staged = await self._in_time(staging[0], lookup)
                if staged is None:
                    self._blame(lookup, lookup.start + min(start + size, len(hashes)))
                    return
                staging.popleft()
                try:
                    fits = await self._load(lookup, staged, lookup.start + start)
                finally:
                    self._pool.unpin(staged.blocks)
                if not fits or len(staged.blocks) < len(hashes[start : start + size]):
                    return
        finally:  # slots that are being filled for nothing are given back when they are there
            for task in staging:
                task.add_done_callback(self._give_back)

    def _blame(self, lookup: Lookup, last: int) -> None:
        """Blocks up to index `last` of the prompt did not come in time: the store's fault if some were to come from
        there."""
        if self._link is not None and last > lookup.at_peer:
            self._link.late()

    def _give_back(self, staging: asyncio.Task[Staged]) -> None:
        if not staging.cancelled() and staging.exception() is None:
            self._pool.unpin(staging.result().blocks)

    async def _load(self, lookup: Lookup, staged: Staged, depth: int) -> bool:
        """From L2 into L1, `depth` blocks from the root, and into the prefix tree. False if there was no room, or the
        lookup had to give way."""
        kv = self._kv
        if not staged.blocks:
            return False
        first_hash = staged.blocks[0].hash
        while (running := self._arriving.get(first_hash)) is not None:  # another request brings the same
            await asyncio.wait([running])  # not its own: one that stops waiting must not cancel it for others
        holding = lookup.holding
        if holding is None:
            return False
        kv.match(holding, lookup.tokens, lookup.limit)  # others may have computed or brought some
        blocks = staged.blocks[len(holding.blocks) - depth :]
        first = len(holding.blocks)
        if not blocks:
            return True
        if kv.pool.available < len(blocks) or kv.grow(holding, (first + len(blocks)) * kv.block_tokens) is None:
            return False
        began = self._clock()
        lookup.copying = True
        arriving = self._arriving[first_hash] = asyncio.get_running_loop().create_future()
        try:
            await self._mover.load([block.slot for block in blocks], holding.blocks[first:])
        except BaseException:
            await self._mover.idle()
            raise
        finally:
            lookup.copying = False
            del self._arriving[first_hash]
            arriving.set_result(None)
            self.wake()  # a request that found no block may take this lookup's now: it gave way to the copy only
        kv.commit(holding, lookup.tokens, (first + len(blocks)) * kv.block_tokens, None)
        for block in blocks:
            lookup.brought.add(staged.came.get(block.hash, "l2"), 1)
        self._account(blocks, self._clock() - began)
        return True

    def _account(self, blocks: list[HostBlock], seconds: float) -> None:
        self.counts.loaded += len(blocks)
        self.counts.bytes_loaded += len(blocks) * self._mover.page_bytes
        self.counts.load_s += seconds
        self.prediction.fetched("l2", len(blocks), seconds)

    # -- exports ---------------------------------------------------------------------------------------------

    @property
    def transfers(self) -> bool:
        """It can hand KV over to other instances, and take theirs."""
        return self._transfer is not None

    @property
    def page_bytes(self) -> int:
        """Of one block."""
        return self._mover.page_bytes

    def export_soon(self, holding: Holding, first: int = 0) -> int:
        """What this holding has computed, which goes on growing, is to be exported: its blocks from index `first` on
        are copied to L2, before all others. Returns the `first` of the next call. O(new blocks)."""
        return self._exports.soon(holding, first) if self._exports is not None else first

    async def export(self, tokens: array[int], salt: str, adapter: str, lease: str, lease_s: float) -> KvSource | None:
        """Make the leading whole blocks of these tokens ready to be pulled by another instance for lease_s seconds:
        those that L2 has, and those that L1 still has and L2 has room for, older leases giving way. None if there are
        none. The lease is named by the caller; one of the same name ends."""
        if self._exports is None:
            return None
        return await self._exports.export(tokens, salt, adapter, lease, lease_s)

    def release(self, leases: Sequence[str]) -> None:
        """These are not needed any more; unknown ones are ignored."""
        if self._exports is not None:
            self._exports.leases.release(leases)

    @property
    def leases(self) -> int:
        """How many are held now."""
        if self._exports is None:
            return 0
        self._exports.leases.expire(self._clock())
        return len(self._exports.leases)

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def hashes(self) -> list[bytes]:
        """Names of the blocks that L2 has."""
        return self._pool.ready()

    def snapshot(self) -> TierCounts:
        counts = self.counts
        counts.l2_blocks = len(self._pool)
        counts.l2_evicted = self._pool.num_evicted
        counts.leases = self.leases
        if self._exports is not None:
            counts.leases_expired = self._exports.leases.expired
            counts.leases_revoked = self._exports.leases.revoked
        if self._link is not None:
            counts.l3_evicted = self._link.store.counts.evicted
            counts.corrupt = self._link.store.counts.corrupt
            counts.store_errors = self._link.errors
            counts.store_down = int(self._link.down)
        return msgspec.structs.replace(counts)

    async def clear(self, *, store: bool) -> bool:
        """Forget what L1 and L2 hold and nobody uses; with `store`, what the store holds too. Whether L1 and L2 hold
        nothing any more. Raises StoreError."""
        self._demotion.forget()
        settled = self._spawn(self._demotion.settled())
        await asyncio.wait([settled], timeout=CLEAR_GRACE_S)
        settled.cancel()
        empty = self._clear_memory()
        if store and self._link is not None:
            await self._link.clear()
            empty = self._clear_memory()  # what a lookup had begun to read
        if empty and (store or self._link is None):
            self._sink(AllBlocksCleared())
        return empty

    def hold_writes(self, hold: bool) -> None:
        """Write nothing to the store for the time being (True), or do so again."""
        if self._link is not None:
            self._link.held = hold

    def _clear_memory(self) -> bool:
        self._demotion.forget()
        if self._exports is not None:
            self._exports.leases.clear()
        empty = self._kv.clear()
        self._pool.clear()
        return empty and not len(self._pool)

    def check(self) -> None:
        """Raise AssertionError unless the books of L2 balance."""
        self._pool.check()
        if self._exports is not None:
            self._exports.leases.check()
