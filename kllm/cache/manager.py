"""KVManager: the KV that requests hold, over one block pool and one prefix tree.

What one request holds, in token order:

    blocks   [ t t t t t | f f f p ]      t: ready, owned by the tree, pinned by the request's cursor
                         ▲                f: filling, private; full ones enter the tree when their plan commits
                    cursor.depth          p: the last one, partly filled

Nothing here knows how many bytes a block has or where it lies.
"""

from __future__ import annotations

from array import array

from kllm.cache.block_pool import FILLING, READY, BlockPool
from kllm.cache.prefix_tree import PrefixCursor, PrefixTree


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
    """block_tokens: tokens per block. enable_prefix_caching=False keeps every block private."""

    def __init__(self, num_blocks: int, block_tokens: int, enable_prefix_caching: bool = True) -> None:
        self.block_tokens = block_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree()
        self.pool.set_reclaimer(self.tree.evict, lambda: self.tree.evictable)
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
        """Something given up still waits for a plan to commit."""
        return self.pool.num_leaving > 0 or bool(self._fenced_cursors)

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
        blocks = self.pool.allocate(max(0, self.blocks_for(num_tokens) - len(holding.blocks)))
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
        kept = self.tree.insert(cursor, self._keys(tokens, first, last), own)
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

    def clear(self) -> None:
        """Forget every cached prefix that no request uses."""
        self.pool.recycle(self.tree.clear())

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
        assert len(private) == len(set(private)), "two requests write to one block"
        assert set(private) == self.pool.blocks_in(FILLING)
