"""PrefixTree: which token prefixes have their KV in the cache, as a radix tree over whole blocks.

    root ── [sys-0 sys-1 sys-2] ─┬─ [userA-0 userA-1]          a node is a run of blocks with no branch inside;
                                 └─ [userB-0] ─┬─ [turn2-0]    children are found by their first block's tokens
                                               └─ [turn2'-0]
                                          ▲
                                       cursor: always at the end of a node's run

A block's key is the bytes of its tokens, compared exactly: no hash collision can hand one tenant another's KV.
Prefixes of different isolation salt or adapter live under different roots.

`PrefixCursor` is the position a request has reached. It pins the path from the root to its node: blocks on it
are not evicted. `match` and `insert` continue from the cursor, so a chunk costs its own blocks whatever the
prefix length (capability D3). Cursors stay valid across splits, because a split keeps the lower part's identity.
Runs are at most MAX_RUN blocks, which bounds what a split copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

from kllm.cache.eviction import EvictionPolicy, LeastRecentlyUsed

MAX_RUN = 256

RootKey = tuple[str, str]  # (isolation salt, adapter id)


class Node:
    """A run of blocks. keys[i] are the tokens of blocks[i]; `end` is the depth in blocks after the run.

    locks: cursors at this node or below. used: tick of the last cursor that left it or something below it.
    uses: requests that began with it in the tree. credit: the eviction policy's own.
    """

    __slots__ = ("blocks", "children", "credit", "end", "keys", "locks", "parent", "ticket", "used", "uses")

    def __init__(self, parent: Node | None, keys: list[bytes], blocks: list[int], end: int) -> None:
        self.parent = parent
        self.keys = keys
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.end = end
        self.locks = 0
        self.used = 0
        self.uses = 0
        self.credit = 0.0
        self.ticket = -1  # number of this node's valid entry in the eviction heap, -1: none


class Root(Node):
    """The empty prefix of one (salt, adapter)."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey) -> None:
        super().__init__(None, [], [], 0)
        self.key = key


class PrefixCursor:
    """Where a request stands in the tree: after `depth` blocks of its prefix. Made and moved by the tree only."""

    __slots__ = ("key", "node")

    def __init__(self, node: Root) -> None:
        self.key = node.key
        self.node: Node = node

    @property
    def depth(self) -> int:
        return self.node.end


class PrefixTree:
    """Owns the blocks it was given by `insert` until it returns them from `evict` or `clear`.

    policy: the order in which leaves are evicted; LRU by default.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self._roots: dict[RootKey, Root] = {}
        self.policy: EvictionPolicy = policy or LeastRecentlyUsed()
        self._heap: list[tuple[float, int, Node]] = []
        self._tickets = count()
        self._tick = 0
        self._num_nodes = 0
        self._cursors: set[PrefixCursor] = set()
        self.num_blocks = 0
        self.evictable = 0  # blocks in nodes without locks

    # -- cursors ---------------------------------------------------------------------------------------------

    def cursor(self, salt: str = "", adapter: str = "") -> PrefixCursor:
        """A cursor at the root of its (salt, adapter). Must be given back with release()."""
        key = (salt, adapter)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key)
        cursor = PrefixCursor(root)
        root.locks += 1
        self._cursors.add(cursor)
        return cursor

    def release(self, cursor: PrefixCursor) -> None:
        """Unpin the path. Costs the number of nodes on it. The cursor must not be used again."""
        self._cursors.remove(cursor)
        self._tick += 1
        node: Node | None = cursor.node
        cursor.node.used = self._tick
        while node is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable += len(node.blocks)
                if not node.children:
                    self._retire(node)
            node = node.parent

    def note_use(self, cursor: PrefixCursor) -> None:
        """A request begins with the cursor's prefix. Costs the number of nodes on its path."""
        node = cursor.node
        at_edge = not node.children
        while node.parent is not None:
            if at_edge:
                self.policy.reused(node)
                at_edge = len(node.parent.children) == 1
            node.uses += 1
            node = node.parent

    def _descend(self, cursor: PrefixCursor, child: Node) -> None:
        """Move the cursor from child's parent to child."""
        if child.locks == 0:
            self.evictable -= len(child.blocks)
            child.ticket = -1
        child.locks += 1
        cursor.node = child

    # -- match and insert ------------------------------------------------------------------------------------

    def ahead(self, cursor: PrefixCursor, key: bytes) -> int:
        """Blocks in the run that continues the cursor's prefix with `key`, 0 if there is none. O(1)."""
        child = cursor.node.children.get(key)
        return len(child.blocks) if child is not None else 0

    def match(self, cursor: PrefixCursor, keys: list[bytes]) -> list[int]:
        """Advance the cursor over the blocks of the tree that continue its prefix with `keys`.

        Returns the block ids of the matched leading part, now pinned. O(matched)."""
        matched: list[int] = []
        while len(matched) < len(keys):
            child = cursor.node.children.get(keys[len(matched)])
            if child is None:
                break
            length = _common(child.keys, keys, len(matched))
            if length < len(child.keys):
                child = self._split(child, length)
            self._descend(cursor, child)
            matched += child.blocks
        return matched

    def insert(self, cursor: PrefixCursor, keys: list[bytes], blocks: list[int]) -> list[int]:
        """Add the caller's `blocks` (holding the KV of `keys`) after the cursor and advance it past them.

        Returns the block ids now at these places. Where it differs from `blocks`, another request was first: the
        caller must use the returned block and free its own. O(len(keys))."""
        existing = self.match(cursor, keys)
        start = len(existing)
        if start < len(keys):
            self._append(cursor, keys[start:], blocks[start:])
        return existing + blocks[start:]

    def _append(self, cursor: PrefixCursor, keys: list[bytes], blocks: list[int]) -> None:
        self.num_blocks += len(keys)
        done = 0
        node = cursor.node
        if node.parent is not None and node.locks == 1 and not node.children:  # a leaf that only we stand on
            done = min(len(keys), MAX_RUN - len(node.keys))
            node.keys += keys[:done]
            node.blocks += blocks[:done]
            node.end += done
        while done < len(keys):
            parent = cursor.node
            run = keys[done : done + MAX_RUN]
            child = Node(parent, run, blocks[done : done + MAX_RUN], parent.end + len(run))
            child.locks = 1
            if not parent.children:  # goes on with what the parent's users began, unlike a branch
                child.uses = parent.uses
            parent.children[run[0]] = child
            self._num_nodes += 1
            cursor.node = child
            done += len(run)

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` blocks. The new upper part is returned; `node` itself becomes the lower part,
        so cursors at its end stay where they are."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.keys[:length], node.blocks[:length], node.end - len(node.keys) + length)
        upper.locks = node.locks
        upper.used = node.used
        upper.uses = node.uses
        parent.children[upper.keys[0]] = upper
        del node.keys[:length], node.blocks[:length]
        node.parent = upper
        upper.children[node.keys[0]] = node
        self._num_nodes += 1
        return upper

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, wanted: int) -> list[int]:
        """Give up at least `wanted` blocks if so many are evictable, else all that are: leaves first, each from its
        tail, in order of value. O(1) per block, O(log nodes) per node."""
        return self._take(wanted, self.policy.lost)

    def _take(self, wanted: int, tell: Callable[[Node, int, int], None]) -> list[int]:
        """tell: called with each node that loses blocks, how many, and the tick."""
        freed: list[int] = []
        while len(freed) < wanted and self._heap:
            value, ticket, node = heapq.heappop(self._heap)
            if node.ticket != ticket:
                continue
            now_worth = self.policy.reconsider(node, value)
            if now_worth > value:
                self._queue(node, now_worth)
                continue
            node.ticket = -1
            taken = min(wanted - len(freed), len(node.blocks))
            tell(node, taken, self._tick)
            first_key = node.keys[0]
            freed += reversed(node.blocks[-taken:])
            del node.blocks[-taken:], node.keys[-taken:]
            node.end -= taken
            if node.blocks:
                self._retire(node)
            else:
                self._remove(node, first_key)
        self.evictable -= len(freed)
        self.num_blocks -= len(freed)
        return freed

    def coldest(self, count: int) -> list[int]:
        """Up to `count` blocks that evict() would give up first, coldest first; nodes that become leaves only then are
        left out. O(n log n) in the nodes looked at: a place of the heap comes after its parent, (place - 1) // 2."""
        heap, blocks = self._heap, list[int]()
        frontier = [(heap[0][:2], 0)] if heap else []  # (value, ticket), place
        while frontier and len(blocks) < count:
            (_, ticket), place = heapq.heappop(frontier)
            node = heap[place][2]
            if node.ticket == ticket:
                blocks += reversed(node.blocks)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child][:2], child))
        return blocks[:count]

    def clear(self) -> list[int]:
        """Give up everything that no cursor pins."""
        return self._take(self.evictable, lambda node, count, tick: None)

    def _remove(self, node: Node, first_key: bytes) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[first_key]
        self._num_nodes -= 1
        parent.used = max(parent.used, node.used)
        if not parent.children and not parent.locks:
            self._retire(parent)

    def _retire(self, node: Node) -> None:
        """An unlocked node without children: into the eviction order, or out if it is an empty root."""
        if isinstance(node, Root):
            del self._roots[node.key]
            return
        if len(self._heap) > 2 * self._num_nodes + 64:  # entries of nodes that were pinned again or are gone
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)
        self._queue(node, self.policy.value(node))

    def _queue(self, node: Node, value: float) -> None:
        node.ticket = next(self._tickets)
        heapq.heappush(self._heap, (value, node.ticket, node))

    # -- inspection ------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents before children."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self, cursor: PrefixCursor) -> list[int]:
        """Blocks from the root to the cursor (for checks and tests: costs the whole prefix)."""
        parts: list[list[int]] = []
        node: Node | None = cursor.node
        while node is not None:
            parts.append(node.blocks)
            node = node.parent
        return [block for part in reversed(parts) for block in part]

    def check(self) -> set[int]:
        """Raise AssertionError unless the tree is sound. Returns the blocks it owns."""
        locks: dict[Node, int] = {}
        for cursor in self._cursors:
            node: Node | None = cursor.node
            while node is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        owned: list[int] = []
        evictable = nodes = 0
        for node in self.nodes():
            owned += node.blocks
            assert node.locks == locks.get(node, 0), f"{node.locks} locks, {locks.get(node, 0)} cursors"
            if node.parent is None:
                assert not node.blocks
                assert node.end == 0
                assert node.locks or node.children
                continue
            nodes += 1
            evictable += 0 if node.locks else len(node.blocks)
            assert 0 < len(node.blocks) == len(node.keys) <= MAX_RUN
            assert node.end == node.parent.end + len(node.blocks)
            assert node.parent.children[node.keys[0]] is node
            assert (node.ticket >= 0) == (not node.locks and not node.children)
        assert len(owned) == len(set(owned)) == self.num_blocks
        assert evictable == self.evictable
        assert nodes == self._num_nodes
        return set(owned)


def _common(run: list[bytes], keys: list[bytes], start: int) -> int:
    """Length of the common prefix of `run` and keys[start:]."""
    length = min(len(run), len(keys) - start)
    if run[:length] == keys[start : start + length]:
        return length
    return next(i for i in range(length) if run[i] != keys[start + i])
