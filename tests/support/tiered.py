"""A cache with lower tiers and no engine: requests that look up, take what is cached, and compute the rest."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from support.memory_transfer import MemoryNetwork
from support.page_memory import DictStore, MemoryMover, contents

from kllm.cache.events import CacheEvent
from kllm.cache.eviction import EvictionName
from kllm.cache.manager import KVManager
from kllm.cache.tiers.lookup import Brought
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.store_link import StoreLink
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.messages import KvSource
from kllm.simulation.workers import SimulatedWorkers

BLOCK_TOKENS = 4
FINGERPRINT = "00112233"


def tokens_of(*blocks: int, more: int = 1) -> array[int]:
    """A prompt of these blocks, each filled with its number, and `more` tokens."""
    return array("i", [number for number in blocks for _ in range(BLOCK_TOKENS)] + [99] * more)


class TieredRequests:
    """kv and tiers over memory whose contents are checked wherever a request takes them from the cache."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        store: DictStore | None = None,
        settings: TierSettings | None = None,
        delay: Callable[[], float] = lambda: 0.0,
        eviction: EvictionName = "lru",
        network: MemoryNetwork | None = None,
    ) -> None:
        self.events: list[CacheEvent] = []
        self.kv = KVManager(
            num_blocks, BLOCK_TOKENS, fingerprint=FINGERPRINT, sink=self.events.append, eviction=eviction
        )
        self.mover = MemoryMover(num_blocks, num_slots, delay)
        clock = asyncio.get_running_loop().time
        self.link = StoreLink(store, FINGERPRINT, clock) if store is not None else None
        self.transfer = network.join(self.mover) if network is not None else None
        self.tiers = TieredCache(
            self.kv,
            num_slots,
            self.mover,
            self.link,
            settings or TierSettings(predict=False),
            SimulatedWorkers(),
            clock,
            self.events.append,
            self.transfer,
        )
        self.tiers.start()

    async def look_up(self, tokens: array[int], salt: str = "", source: KvSource | None = None) -> Brought | None:
        """None: there was nothing to look for."""
        found: asyncio.Future[Brought] = asyncio.get_running_loop().create_future()
        task = self.tiers.look_up(tokens, salt, "", found.set_result, source)
        return None if task is None else await found

    def use(self, tokens: array[int], salt: str = "") -> int | None:
        """Take what L1 has, check it, compute the rest and give it all back. Blocks taken; None if there is no room."""
        kv = self.kv
        expected = contents(FINGERPRINT, tokens, BLOCK_TOKENS, salt)
        holding = kv.open(salt)
        matched = kv.match(holding, tokens, len(tokens) - 1) // BLOCK_TOKENS
        for index in range(matched):
            assert self.mover.device[holding.blocks[index]] == expected[index], "wrong KV was served"
        kv.note_use(holding)
        if kv.grow(holding, len(tokens)) is None:
            kv.close(holding)
            return None
        for index in range(matched, len(expected)):
            self.mover.device[holding.blocks[index]][:] = expected[index]
        kv.commit(holding, tokens, len(expected) * BLOCK_TOKENS, None)
        kv.close(holding)
        return matched

    async def request(self, tokens: array[int], salt: str = "", source: KvSource | None = None) -> int | None:
        """Both, one after the other."""
        await self.look_up(tokens, salt, source)
        return self.use(tokens, salt)

    async def export(
        self, tokens: array[int], lease: str = "lease", salt: str = "", lease_s: float = 60.0
    ) -> KvSource | None:
        """What an instance does that has prefilled them: all but the last token have KV."""
        return await self.tiers.export(tokens[:-1], salt, "", lease, lease_s)

    async def settle(self) -> None:
        """Until everything has gone down that was to go."""
        await self.tiers._demotion.settled()

    def check(self) -> None:
        self.kv.check()
        self.tiers.check()

    async def close(self) -> None:
        await self.tiers.close(1e6)
        self.check()
