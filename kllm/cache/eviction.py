"""Which leaf of the prefix tree goes when room is needed: policies, chosen by name. No clock, no I/O.

    lru     the one left longest ago
    value   the one left longest ago, where a leaf that is worth more counts as left later

Time is the tree's tick, which rises with every cursor that is released. The tree keeps leaves in a heap by the value
they had when they became evictable, so what a policy does costs O(1) per node, and nothing per block.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Literal, Protocol

EvictionName = Literal["lru", "value"]

ATTENTION_SPAN = 32_768  # tokens of prefix at which attention costs as much as the rest (a dense 8 B model with GQA)
FETCH_PRICE = 1 / 8  # what bringing a block up costs, over computing the first block of a prompt
CLASSES = 6  # by uses: 0, 1, 2-3, 4-7, 8-15, more
DOUBT = 1 / 32  # of the cache's blocks: outcomes of either kind that each class is taken to have had already
MEMORY = 4  # times the cache's blocks: after so many outcomes, older ones count half


class Leaf(Protocol):
    """What a policy may know of a node: a run of `blocks` at the edge of the tree, that ends `end` blocks after its
    beginning.

    used: tick when the last cursor left it. uses: requests that began with it in the cache.
    credit: the policy's own, kept with the node.
    """

    blocks: list[int]
    end: int
    used: int
    uses: int
    credit: float


class EvictionPolicy(Protocol):
    """Told by the PrefixTree what happens to leaves; the one of least value goes first."""

    def value(self, leaf: Leaf) -> float:
        """Nobody uses it any more, or it has just become a leaf. Must not be above what `reconsider` will say."""
        ...

    def reconsider(self, leaf: Leaf, value: float) -> float:
        """It is about to go, by `value`. If it is worth more now, it waits its turn with what is returned."""
        ...

    def lost(self, leaf: Leaf, count: int, now: int) -> None:
        """The last `count` blocks of it are evicted at tick `now` (called before they are taken from it)."""
        ...

    def reused(self, leaf: Leaf) -> None:
        """A request begins with all of it, and nothing branched off."""
        ...


class LeastRecentlyUsed:
    """The baseline."""

    def value(self, leaf: Leaf) -> float:
        return leaf.used

    def reconsider(self, leaf: Leaf, value: float) -> float:
        return value

    def lost(self, leaf: Leaf, count: int, now: int) -> None:
        pass

    def reused(self, leaf: Leaf) -> None:
        pass


class ValueAware:
    """LRU, where a leaf may stay for a time in proportion to what it is worth:

        value  = tick of its last use + T · worth
        worth  = sqrt(odds · sqrt(price))
        odds   share of the blocks of its class that were used again before they were evicted; classes are by how often
               a leaf has been used, and the odds are learned from what happens in this cache
        price  what its loss costs: computing its last block, 1 + depth / ATTENTION_SPAN, since attention goes over all
               that comes before; or bringing that block up, FETCH_PRICE, while a tier below has it
        T      mean age of what was evicted of late / its mean worth: evicted leaves had on average what they deserved

    Where all leaves are alike this is LRU, and so it is until something has been evicted. The roots are by measurement
    (docs/cache-eviction.md): odds are learned from what stays, so leaves of low odds must stay long enough to prove
    them wrong; and what is deep is also large, and keeps out several others.

    copied: whether a tier below has a block; None where there is no such tier. A copy may vanish while the leaf waits
    for its end, so the value assumes that it is there, and is raised when the leaf's turn comes and it is not.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, copied: Callable[[int], bool | None] = lambda block: None
    ) -> None:
        self._depth_price = block_tokens / ATTENTION_SPAN
        self._copied = copied
        self._reused = [DOUBT * num_blocks] * CLASSES
        self._lost = [DOUBT * num_blocks] * CLASSES
        self._memory = MEMORY * num_blocks
        self._evicted = self._ages = self._worths = 0.0  # blocks evicted, and their sums of age and worth

    def odds(self, uses: int) -> float:
        """Probability that a leaf with so many uses is used once more."""
        kind = _kind(uses)
        return self._reused[kind] / (self._reused[kind] + self._lost[kind])

    def value(self, leaf: Leaf) -> float:
        time = self._ages / self._worths if self._worths else 0.0
        leaf.credit = time * sqrt(self.odds(leaf.uses))
        nothing_below = self._copied(leaf.blocks[-1]) is None
        return leaf.used + leaf.credit * _damped(self._compute_price(leaf) if nothing_below else FETCH_PRICE)

    def reconsider(self, leaf: Leaf, value: float) -> float:
        return leaf.used + leaf.credit * _damped(self._price(leaf))

    def lost(self, leaf: Leaf, count: int, now: int) -> None:
        self._evicted += count
        self._ages += count * (now - leaf.used)
        self._worths += count * sqrt(self.odds(leaf.uses)) * _damped(self._price(leaf))
        if self._evicted > self._memory / 2:
            self._evicted, self._ages, self._worths = self._evicted / 2, self._ages / 2, self._worths / 2
        self._count(self._lost, leaf, count)

    def reused(self, leaf: Leaf) -> None:
        self._count(self._reused, leaf, len(leaf.blocks))

    def _count(self, outcomes: list[float], leaf: Leaf, count: int) -> None:
        kind = _kind(leaf.uses)
        outcomes[kind] += count
        if self._reused[kind] + self._lost[kind] > self._memory:
            self._reused[kind] /= 2
            self._lost[kind] /= 2

    def _price(self, leaf: Leaf) -> float:
        return FETCH_PRICE if self._copied(leaf.blocks[-1]) else self._compute_price(leaf)

    def _compute_price(self, leaf: Leaf) -> float:
        return 1.0 + self._depth_price * leaf.end


def _damped(price: float) -> float:
    return sqrt(sqrt(price))


def _kind(uses: int) -> int:
    return min(uses.bit_length(), CLASSES - 1)


def make_policy(
    name: EvictionName, num_blocks: int, block_tokens: int, copied: Callable[[int], bool | None]
) -> EvictionPolicy:
    """num_blocks, block_tokens: of the cache. copied: see ValueAware."""
    if name == "value":
        return ValueAware(num_blocks, block_tokens, copied)
    return LeastRecentlyUsed()
