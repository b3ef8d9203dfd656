"""BlockPool: a fixed number of KV blocks, each with exactly one owner at any time.

    free ──allocate──► filling ──publish──► ready ──reclaim──► free
                          │                                      ▲
                          ├──────────── release ─────────────────┤
                          └──retire──► leaving ──(fence passed)──┘

free: on the free list. filling: private to one request, plans write to it. ready: owned by the prefix tree,
read-only, shared by any number of requests through their pinned cursors. leaving: given up by its owner while
an uncommitted plan still names it.

Sharing needs no count per block: a request shares blocks of the tree by pinning the tree node it has reached
(see prefix_tree), so a match of a million tokens pins one path instead of touching 62,500 counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

FREE, FILLING, READY, LEAVING = range(4)
STATE_NAMES = ("free", "filling", "ready", "leaving")


class BlockStateError(RuntimeError):
    """A block was used in a way its state forbids: a bug in the caller, never load."""


class BlockPool:
    """Block ids 0 .. num_blocks - 1. All operations are O(1) per block.

    reclaim(n) is asked for at least n ready blocks when the free list runs short; it returns block ids that are
    in no one's use any more (the prefix tree's eviction), and may return fewer.
    reclaimable() says how many it could give.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a block pool needs at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._state = bytearray(num_blocks)  # FREE everywhere
        self._fences: dict[int, list[int]] = {}  # plan id: blocks that are free once it has committed
        self._leaving = 0
        self._reclaim: Callable[[int], list[int]] = lambda count: []
        self._reclaimable: Callable[[], int] = lambda: 0

    def set_reclaimer(self, reclaim: Callable[[int], list[int]], reclaimable: Callable[[], int]) -> None:
        self._reclaim = reclaim
        self._reclaimable = reclaimable

    @property
    def available(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + self._reclaimable()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        """Blocks that become free when the plans in flight commit."""
        return self._leaving

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks in state filling, or None (and nothing changed) if there are not enough."""
        if count > len(self._free):
            if count > self.available:
                return None
            for block in self._reclaim(count - len(self._free)):
                self._move(block, READY, FREE)
                self._free.append(block)
            if count > len(self._free):
                raise BlockStateError("the reclaimer gave fewer blocks than it said it could")
        if count == 0:
            return []
        blocks = self._free[-count:]
        blocks.reverse()
        del self._free[-count:]
        for block in blocks:
            self._state[block] = FILLING
        return blocks

    def publish(self, blocks: Iterable[int]) -> None:
        """filling -> ready: the prefix tree owns them now."""
        for block in blocks:
            self._move(block, FILLING, READY)

    def release(self, blocks: Iterable[int], fence: int | None = None) -> None:
        """The owner of filling blocks gives them up: free at once, or once plan `fence` has committed."""
        if fence is None:
            for block in blocks:
                self._move(block, FILLING, FREE)
                self._free.append(block)
            return
        leaving = list(blocks)
        for block in leaving:
            self._move(block, FILLING, LEAVING)
        self._leaving += len(leaving)
        self._fences.setdefault(fence, []).extend(leaving)

    def passed(self, plan_id: int) -> None:
        """Plan `plan_id` and all before it have committed: their fences fall."""
        for fence in [fence for fence in self._fences if fence <= plan_id]:
            blocks = self._fences.pop(fence)
            self._leaving -= len(blocks)
            for block in blocks:
                self._move(block, LEAVING, FREE)
                self._free.append(block)

    def recycle(self, blocks: Iterable[int]) -> None:
        """ready -> free: the prefix tree gives up blocks without being asked for room."""
        for block in blocks:
            self._move(block, READY, FREE)
            self._free.append(block)

    def _move(self, block: int, source: int, target: int) -> None:
        state = self._state[block]
        if state != source:
            raise BlockStateError(
                f"block {block} is {STATE_NAMES[state]}, cannot go from {STATE_NAMES[source]} to {STATE_NAMES[target]}"
            )
        self._state[block] = target

    def blocks_in(self, state: int) -> set[int]:
        return {block for block, value in enumerate(self._state) if value == state}

    def check(self) -> None:
        """Raise BlockStateError unless the books balance."""
        free = set(self._free)
        if len(free) != len(self._free) or free != self.blocks_in(FREE):
            raise BlockStateError("the free list and the states disagree")
        fenced = [block for blocks in self._fences.values() for block in blocks]
        if len(fenced) != self._leaving or set(fenced) != self.blocks_in(LEAVING):
            raise BlockStateError("the fences and the states disagree")
