"""KVManager: the KV that requests hold, over one block pool and one prefix tree.

What one request holds, in token order:

    blocks   [ t t t t t | f f f p ]      t: ready, owned by the tree, pinned by the request's cursor
                         ▲                f: filling, private; full ones enter the tree when their plan commits
                    cursor.depth          p: the last one, partly filled

Nothing here knows how many bytes a block has or where it lies. Blocks of the tree have names (block_hash) where there
are lower tiers, or others who want to know what is cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from kllm.cache.block_hash import chain, root_hash
from kllm.cache.block_pool import FILLING, READY, BlockPool
from kllm.cache.events import BlockRemoved, BlockStored, EventSink, Medium
from kllm.cache.eviction import EvictionName, make_policy
from kllm.cache.prefix_tree import PrefixCursor, PrefixTree


class LowerTiers(Protocol):
    """What lies below the device (TieredCache), as the KVManager tells it what happens. Every method returns at once.

    lending: it holds blocks for a while. copying: into some of them a copy runs, which is over soon.
    counts_uses: it wants to be told what is used.
    """

    @property
    def lending(self) -> bool: ...

    @property
    def copying(self) -> bool: ...

    @property
    def counts_uses(self) -> bool: ...

    def computed(self, hashes: Sequence[bytes]) -> None: ...

    def used(self, hashes: list[bytes]) -> None: ...

    def evicted(self, hashes: Sequence[bytes]) -> None: ...

    def holds(self, block_hash: bytes) -> bool:
        """It has the block, so that losing it above costs no more than bringing it up."""
        ...

    def give_way(self) -> bool:
        """Give back what it holds, as far as possible at once. Whether there was anything."""
        ...


class Holding:
    """Block table of one request, and its place in the prefix tree. Changed by KVManager only."""

    __slots__ = ("blocks", "cursor")

    def __init__(self, cursor: PrefixCursor | None) -> None:
        self.blocks: list[int] = []
        self.cursor = cursor

    @property
    def shared(self) -> int:
        """Leading blocks that belong to the tree."""
        return self.cursor.depth if self.cursor is not None else 0


class KVManager:
    """block_tokens: tokens per block. enable_prefix_caching=False keeps every block private.

    fingerprint: of the KVSpec; given, blocks of the tree have names, and `sink` hears what comes and goes.
    eviction: which cached prefixes go first (kllm.cache.eviction). lower: the tiers below, if there are any.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        enable_prefix_caching: bool = True,
        *,
        fingerprint: str | None = None,
        sink: EventSink | None = None,
        eviction: EvictionName = "lru",
    ) -> None:
        self.block_tokens = block_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(make_policy(eviction, num_blocks, block_tokens, self.has_copy))
        self.lower: LowerTiers | None = None
        self.pool.set_reclaimer(self._evict, lambda: self.tree.evictable)
        self._sink = sink
        self._fingerprint = fingerprint
        self._names: list[bytes] = [b""] * num_blocks if fingerprint is not None else []  # of the tree's blocks, by id
        self._versions = array("q", bytes(8 * len(self._names)))  # how often a block has entered the tree
        self._block_of: dict[bytes, int] = {}
        self._fenced_cursors: dict[int, list[PrefixCursor]] = {}  # by the plan that must commit first
        self._holdings: set[Holding] = set()

    # -- capacity --------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @property
    def available(self) -> int:
        """Blocks that can be had now, cached ones that nobody uses included."""
        return self.pool.available

    @property
    def fenced(self) -> bool:
        """Something given up still waits for a plan to commit, or a copy into blocks for its end."""
        return (
            self.pool.num_leaving > 0 or bool(self._fenced_cursors) or (self.lower is not None and self.lower.copying)
        )

    @property
    def lent(self) -> bool:
        """The lower tiers hold blocks, and say so when they have given them back."""
        return self.lower is not None and self.lower.lending

    @property
    def usage(self) -> float:
        """Share of all blocks that requests hold (the metric kv_cache_usage_perc)."""
        return 1.0 - self.available / self.pool.num_blocks

    @property
    def cached(self) -> float:
        """Share of all blocks that only the prefix tree holds."""
        return self.tree.evictable / self.pool.num_blocks

    # -- life of a holding -----------------------------------------------------------------------------------

    def open(self, salt: str = "", adapter: str = "") -> Holding:
        """An empty holding. Must be closed."""
        cursor = self.tree.cursor(salt, adapter) if self.enable_prefix_caching else None
        holding = Holding(cursor)
        self._holdings.add(holding)
        return holding

    def match(self, holding: Holding, tokens: array[int], limit: int) -> int:
        """Take over cached blocks that continue the holding, within tokens[:limit]. Returns tokens gained.

        Does something only where the whole holding is in the tree. O(tokens gained)."""
        cursor = holding.cursor
        if cursor is None or cursor.depth != len(holding.blocks):
            return 0
        start, end = cursor.depth, limit // self.block_tokens
        while cursor.node.children and cursor.depth < end:
            first = cursor.depth
            run = self.tree.ahead(cursor, self._keys(tokens, first, first + 1)[0])  # a miss costs one key
            matched = self.tree.match(cursor, self._keys(tokens, first, min(first + run, end)))
            holding.blocks += matched
            if not matched or len(matched) < run:
                break
        return (cursor.depth - start) * self.block_tokens

    def cached_tokens(self, tokens: array[int], salt: str = "", adapter: str = "") -> int:
        """Leading tokens that are in the cache now, all but the last one at most. O(tokens found)."""
        if not self.enable_prefix_caching:
            return 0
        holding = self.open(salt, adapter)
        found = self.match(holding, tokens, len(tokens) - 1)
        self.close(holding)
        return found

    def grow(self, holding: Holding, num_tokens: int) -> list[int] | None:
        """Make room for num_tokens in all. Returns the blocks added, or None (nothing changed) if there is no room."""
        wanted = max(0, self.blocks_for(num_tokens) - len(holding.blocks))
        blocks = self.pool.allocate(wanted)
        if blocks is None and self.lower is not None and self.lower.give_way():
            blocks = self.pool.allocate(wanted)
        if blocks:
            holding.blocks += blocks
        return blocks

    def commit(self, holding: Holding, tokens: array[int], computed: int, fence: int | None) -> list[tuple[int, int]]:
        """The KV of tokens[:computed] is there: full blocks enter the tree.

        Returns (index, block) for pages that another request had published first; the holding uses that block now,
        and its own is freed once plan `fence` has committed. O(new blocks)."""
        cursor = holding.cursor
        if cursor is None:
            return []
        first, last = cursor.depth, computed // self.block_tokens
        if last <= first:
            return []
        own = holding.blocks[first:last]
        keys = self._keys(tokens, first, last)
        parent = self.last_hash(holding) if self._names else b""
        kept = self.tree.insert(cursor, keys, own)
        if self._names:
            self._name(keys, kept, own, parent, tokens[first * self.block_tokens : last * self.block_tokens], cursor)
        if kept == own:
            self.pool.publish(own)
            return []
        holding.blocks[first:last] = kept
        remaps = [(first + i, new) for i, (old, new) in enumerate(zip(own, kept, strict=True)) if old != new]
        self.pool.publish(new for old, new in zip(own, kept, strict=True) if old == new)
        self.pool.release((old for old, new in zip(own, kept, strict=True) if old != new), fence)
        return remaps

    def close(self, holding: Holding, fence: int | None = None) -> None:
        """Give everything up, at once or when plan `fence` has committed. Blocks in the tree stay cached."""
        self._holdings.remove(holding)
        private = holding.blocks[holding.shared :]
        if private:
            self.pool.release(private, fence)
        if holding.cursor is not None:
            if fence is None:
                self.tree.release(holding.cursor)
            else:
                self._fenced_cursors.setdefault(fence, []).append(holding.cursor)

    def passed(self, plan_id: int) -> None:
        """Plan `plan_id` has committed (plans commit in order)."""
        self.pool.passed(plan_id)
        for fence in [fence for fence in self._fenced_cursors if fence <= plan_id]:
            for cursor in self._fenced_cursors.pop(fence):
                self.tree.release(cursor)

    def clear(self) -> bool:
        """Forget every cached prefix that no request uses. Whether that was all of them."""
        if self.lower is not None:
            self.lower.give_way()
        blocks = self.tree.clear()
        self._forget(blocks)
        self.pool.recycle(blocks)
        return not self.tree.num_blocks

    # -- names of blocks -------------------------------------------------------------------------------------

    def _name(
        self,
        keys: list[bytes],
        kept: list[int],
        own: list[int],
        parent: bytes,
        tokens: array[int],
        cursor: PrefixCursor,
    ) -> None:
        """Blocks have entered the tree: those of `kept` that are our own, which are its last ones."""
        known = next((i for i, (mine, block) in enumerate(zip(own, kept, strict=True)) if mine == block), len(own))
        if known == len(own):
            return
        if known:
            parent = self._names[kept[known - 1]]
        hashes = chain(parent, keys[known:])
        for block, block_hash in zip(kept[known:], hashes, strict=True):
            self._names[block] = block_hash
            self._versions[block] += 1
            self._block_of[block_hash] = block
        if self._sink is not None:
            before = parent if cursor.depth > len(hashes) else None
            new = tokens[known * self.block_tokens :]
            self._sink(BlockStored(hashes, before, new, self.block_tokens, Medium.DEVICE, *cursor.key))
        if self.lower is not None:
            self.lower.computed(hashes)

    def _evict(self, count: int) -> list[int]:
        blocks = self.tree.evict(count)
        self._forget(blocks)
        return blocks

    def _forget(self, blocks: list[int]) -> None:
        """They have left the tree."""
        if not self._names or not blocks:
            return
        hashes = [self._names[block] for block in blocks]
        for block_hash in hashes:
            del self._block_of[block_hash]
        if self._sink is not None:
            self._sink(BlockRemoved(hashes, Medium.DEVICE))
        if self.lower is not None:
            self.lower.evicted(hashes)

    def last_hash(self, holding: Holding) -> bytes:
        """Name of the last block that the holding shares with the tree, or of the empty prefix."""
        if holding.shared:
            return self._names[holding.blocks[holding.shared - 1]]
        assert holding.cursor is not None
        assert self._fingerprint is not None
        return root_hash(self._fingerprint, *holding.cursor.key)

    def shared_names(self, holding: Holding, first: int = 0) -> list[bytes]:
        """Names of the blocks that the holding shares with the tree, from block `first` on."""
        return [self._names[block] for block in holding.blocks[first : holding.shared]]

    def hashes_after(self, holding: Holding, tokens: array[int], last: int) -> list[bytes]:
        """Names of the blocks from the end of what the holding shares up to block `last`."""
        return chain(self.last_hash(holding), self._keys(tokens, holding.shared, last))

    def block_of(self, block_hash: bytes) -> int | None:
        """The block of the tree with this name."""
        return self._block_of.get(block_hash)

    def has_copy(self, block: int) -> bool | None:
        """Whether the tiers below have this block of the tree; None if there are none."""
        return self.lower.holds(self._names[block]) if self.lower is not None else None

    @property
    def hashes(self) -> Iterable[bytes]:
        """Names of all blocks of the tree."""
        return self._block_of

    def version(self, block: int) -> int:
        """Changes when the block has got other contents: how often it has entered the tree."""
        return self._versions[block]

    def coldest(self, count: int) -> list[bytes]:
        """Names of about `count` blocks that would be evicted next."""
        return [self._names[block] for block in self.tree.coldest(count)]

    def note_use(self, holding: Holding) -> None:
        """A request begins with what the holding shares with the tree."""
        if holding.cursor is not None:
            self.tree.note_use(holding.cursor)
        if self.lower is not None and self.lower.counts_uses and holding.shared:
            self.lower.used(self.shared_names(holding))

    def _keys(self, tokens: array[int], first: int, last: int) -> list[bytes]:
        """Keys of blocks first .. last-1."""
        width = self.block_tokens * tokens.itemsize
        raw = tokens[first * self.block_tokens : last * self.block_tokens].tobytes()
        return [raw[i : i + width] for i in range(0, len(raw), width)]

    def check(self) -> None:
        """Raise unless every block is in exactly one place."""
        self.pool.check()
        owned = self.tree.check()
        assert owned == self.pool.blocks_in(READY)
        private: list[int] = []
        for holding in self._holdings:
            private += holding.blocks[holding.shared :]
            if holding.cursor is not None:
                assert holding.blocks[: holding.shared] == self.tree.path(holding.cursor)
        if self._names:
            assert {self._names[block]: block for block in owned} == self._block_of
        assert len(private) == len(set(private)), "two requests write to one block"
        assert set(private) == self.pool.blocks_in(FILLING)
