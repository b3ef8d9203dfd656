"""PrefixTree against a naive oracle: a dictionary of whole prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kllm.cache import prefix_tree
from kllm.cache.eviction import Leaf, LeastRecentlyUsed
from kllm.cache.prefix_tree import PrefixCursor, PrefixTree

Prefix = tuple[bytes, ...]
ROOTS = [("", ""), ("salt", ""), ("", "adapter"), ("salt", "adapter")]
KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=9)


class Oracle:
    """blocks[root][prefix] is the block holding the last key of that prefix. left[root][prefix]: when the last cursor
    left it or something below it. Evicts block by block: of the unpinned leaves, the one left longest ago."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str], dict[Prefix, int]] = {root: {} for root in ROOTS}
        self.left: dict[tuple[str, str], dict[Prefix, int]] = {root: {} for root in ROOTS}
        self.cursors: dict[PrefixCursor, tuple[tuple[str, str], Prefix]] = {}
        self.tick = 0

    def match(self, cursor: PrefixCursor, keys: list[bytes]) -> list[int]:
        root, prefix = self.cursors[cursor]
        matched = []
        for key in keys:
            if (*prefix, key) not in self.blocks[root]:
                break
            prefix = (*prefix, key)
            matched.append(self.blocks[root][prefix])
        self.cursors[cursor] = (root, prefix)
        return matched

    def insert(self, cursor: PrefixCursor, keys: list[bytes], blocks: list[int]) -> list[int]:
        root, prefix = self.cursors[cursor]
        kept = []
        for key, block in zip(keys, blocks, strict=True):
            prefix = (*prefix, key)
            kept.append(self.blocks[root].setdefault(prefix, block))
        self.cursors[cursor] = (root, prefix)
        return kept

    def release(self, cursor: PrefixCursor) -> None:
        root, prefix = self.cursors.pop(cursor)
        self.tick += 1
        for depth in range(1, len(prefix) + 1):
            self.left[root][prefix[:depth]] = self.tick

    def path(self, cursor: PrefixCursor) -> list[int]:
        root, prefix = self.cursors[cursor]
        return [self.blocks[root][prefix[: depth + 1]] for depth in range(len(prefix))]

    def pinned(self) -> set[tuple[tuple[str, str], Prefix]]:
        return {(root, prefix[:depth]) for root, prefix in self.cursors.values() for depth in range(1, len(prefix) + 1)}

    def evict(self, wanted: int) -> list[int]:
        pinned = self.pinned()
        freed = []
        while len(freed) < wanted:
            leaves = [
                (self.left[root][prefix], root, prefix)
                for root, held in self.blocks.items()
                for prefix in held
                if (root, prefix) not in pinned and not any(other[:-1] == prefix for other in held)
            ]
            if not leaves:
                break
            _, root, prefix = min(leaves)
            freed.append(self.blocks[root].pop(prefix))
            self.left[root].pop(prefix)
        return freed


class PrefixTreeMachine(RuleBasedStateMachine):
    """Many cursors at once; nothing that one of them does may be seen by another except as a hit."""

    max_run = 256
    cursors = Bundle("cursors")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_tree, "MAX_RUN", self.max_run)
        self.tree = PrefixTree()
        self.oracle = Oracle()
        self.next_block = 0

    def teardown(self) -> None:
        for cursor in list(self.oracle.cursors):
            self.tree.release(cursor)
        self.tree.clear()
        assert self.tree.check() == set()
        assert list(self.tree.nodes()) == []
        self.patch.undo()

    @rule(target=cursors, root=st.sampled_from(ROOTS))
    def open(self, root: tuple[str, str]) -> PrefixCursor:
        cursor = self.tree.cursor(*root)
        self.oracle.cursors[cursor] = (root, ())
        return cursor

    @rule(cursor=cursors, keys=KEYS)
    def match(self, cursor: PrefixCursor, keys: list[bytes]) -> None:
        assert self.tree.match(cursor, keys) == self.oracle.match(cursor, keys)

    @rule(cursor=cursors, keys=KEYS)
    def insert(self, cursor: PrefixCursor, keys: list[bytes]) -> None:
        blocks = list(range(self.next_block, self.next_block + len(keys)))
        self.next_block += len(keys)
        assert self.tree.insert(cursor, keys, blocks) == self.oracle.insert(cursor, keys, blocks)

    @rule(cursor=consumes(cursors))
    def release(self, cursor: PrefixCursor) -> None:
        self.tree.release(cursor)
        self.oracle.release(cursor)

    @rule(wanted=st.integers(0, 8))
    def evict(self, wanted: int) -> None:
        pinned = {block for cursor in self.oracle.cursors for block in self.oracle.path(cursor)}
        freed = self.tree.evict(wanted)
        assert not pinned & set(freed)
        assert freed == self.oracle.evict(wanted)

    @rule()
    def clear(self) -> None:
        assert self.tree.clear() == self.oracle.evict(10**9)

    @invariant()
    def sound(self) -> None:
        owned = self.tree.check()
        assert owned == {block for held in self.oracle.blocks.values() for block in held.values()}
        assert self.tree.num_blocks == len(owned)
        assert self.tree.evictable == len(owned) - len(self.oracle.pinned())
        for cursor, (_, prefix) in self.oracle.cursors.items():
            assert cursor.depth == len(prefix)
            assert self.tree.path(cursor) == self.oracle.path(cursor)


class ShortRunsMachine(PrefixTreeMachine):
    max_run = 2


class SingleBlockRunsMachine(PrefixTreeMachine):
    max_run = 1


TestLongRuns = PrefixTreeMachine.TestCase
TestShortRuns = ShortRunsMachine.TestCase
TestSingleBlockRuns = SingleBlockRunsMachine.TestCase
MANY = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLongRuns.settings = TestShortRuns.settings = TestSingleBlockRuns.settings = MANY


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(4, "little") for number in numbers]


def test_a_cursor_stays_valid_when_its_node_is_split() -> None:
    tree = PrefixTree()
    writer = tree.cursor()
    tree.insert(writer, keys(*range(6)), list(range(6)))
    other = tree.cursor()
    assert tree.match(other, keys(0, 1, 9)) == [0, 1]
    tree.insert(other, keys(9, 10), [19, 20])
    assert (writer.depth, tree.path(writer)) == (6, [0, 1, 2, 3, 4, 5])
    assert (other.depth, tree.path(other)) == (4, [0, 1, 19, 20])
    tree.insert(writer, keys(6), [6])
    assert tree.path(writer) == list(range(7))
    assert tree.check() == {*range(7), 19, 20}


def test_duplicates_raced_in_are_handed_back() -> None:
    tree = PrefixTree()
    first, second = tree.cursor(), tree.cursor()
    assert tree.insert(first, keys(1, 2, 3), [10, 11, 12]) == [10, 11, 12]
    assert tree.insert(second, keys(1, 2, 4), [20, 21, 22]) == [10, 11, 22]
    assert tree.check() == {10, 11, 12, 22}


def test_salts_and_adapters_share_nothing() -> None:
    tree = PrefixTree()
    tree.insert(tree.cursor("a", ""), keys(1, 2), [0, 1])
    for salt, adapter in (("", ""), ("", "a"), ("b", ""), ("a", "a")):
        assert tree.match(tree.cursor(salt, adapter), keys(1, 2)) == []
    assert tree.match(tree.cursor("a", ""), keys(1, 2)) == [0, 1]


def test_eviction_takes_leaves_first_then_what_was_left_longest_ago() -> None:
    tree = PrefixTree()
    cursors = [tree.cursor() for _ in range(3)]
    tree.insert(cursors[0], keys(1, 2, 3), [0, 1, 2])
    tree.insert(cursors[1], keys(1, 2, 4), [10, 11, 12])
    tree.insert(cursors[2], keys(7), [20])
    for cursor in (cursors[2], cursors[0], cursors[1]):
        tree.release(cursor)
    touched = tree.cursor()
    tree.match(touched, keys(7))
    tree.release(touched)
    assert tree.evict(1) == [2]
    assert tree.evict(3) == [12, 1, 0]
    assert tree.evict(5) == [20]
    assert tree.check() == set()


class MostRecentlyUsed(LeastRecentlyUsed):
    def value(self, leaf: Leaf) -> float:
        return -leaf.used


def test_the_order_of_eviction_is_pluggable() -> None:
    tree = PrefixTree(MostRecentlyUsed())
    for number in range(3):
        cursor = tree.cursor()
        tree.insert(cursor, keys(number), [number])
        tree.release(cursor)
    assert tree.evict(3) == [2, 1, 0]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("step", [1, 100, 256, 1000])
def test_runs_end_at_max_run(length: int, step: int) -> None:
    tree = PrefixTree()
    cursor = tree.cursor()
    all_keys = keys(*range(length))
    for start in range(0, length, step):
        blocks = list(range(start, min(start + step, length)))
        tree.insert(cursor, all_keys[start : start + step], blocks)
        tree.check()
    runs = [len(node.blocks) for node in tree.nodes() if node.blocks]
    assert len(runs) == -(-length // prefix_tree.MAX_RUN)
    assert tree.path(cursor) == list(range(length))
    other = tree.cursor()
    assert tree.match(other, all_keys) == list(range(length))


def test_the_eviction_order_does_not_outgrow_the_tree() -> None:
    """Entries of nodes that are pinned again are dropped, however often that happens."""
    tree = PrefixTree()
    for _ in range(10_000):
        cursor = tree.cursor()
        if not tree.match(cursor, keys(1)):
            tree.insert(cursor, keys(1), [0])
        tree.release(cursor)
    assert len(tree._heap) < 100
    assert tree.evict(1) == [0]


class CountedKey(bytes):
    """Counts how often keys are hashed or compared."""

    uses = 0

    def __hash__(self) -> int:
        CountedKey.uses += 1
        return bytes.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountedKey.uses += 1
        return bytes.__eq__(self, other)


def counted_keys(first: int, count: int) -> list[bytes]:
    return [CountedKey(number.to_bytes(4, "little")) for number in range(first, first + count)]


def costs_of_chunks(tree: PrefixTree, cursor: PrefixCursor, chunks: int, chunk: int) -> Iterator[int]:
    for number in range(chunks):
        new = counted_keys(number * chunk, chunk)
        CountedKey.uses = 0
        tree.insert(cursor, new, list(range(number * chunk, (number + 1) * chunk)))
        yield CountedKey.uses


@pytest.mark.parametrize("chunk", [1, 16, 128, 300])
def test_insertion_costs_the_new_keys_only(chunk: int) -> None:
    tree = PrefixTree()
    costs = list(costs_of_chunks(tree, tree.cursor(), 200, chunk))
    assert max(costs) <= 2 * chunk + 4
    assert max(costs[-50:]) <= max(costs[:50])


@pytest.mark.parametrize("chunk", [1, 16, 128, 300])
def test_matching_and_racing_cost_the_new_keys_only(chunk: int) -> None:
    """A second request that computes the same prompt, chunk by chunk, finds each chunk there already."""
    tree = PrefixTree()
    list(costs_of_chunks(tree, tree.cursor(), 200, chunk))
    costs = list(costs_of_chunks(tree, tree.cursor(), 200, chunk))
    assert max(costs) <= 4 * (chunk + prefix_tree.MAX_RUN // chunk + 1)
    assert sum(costs[-50:]) <= 1.2 * sum(costs[:50])


@given(st.integers(0, 2**32 - 1))
def test_the_coldest_go_first(seed: int) -> None:
    """coldest() changes nothing, and its first block is what evict() gives up."""
    rng = random.Random(seed)
    tree = PrefixTree()
    blocks = iter(range(1000))
    for _ in range(rng.randrange(1, 20)):
        cursor = tree.cursor()
        keys = [bytes([rng.randrange(3)]) for _ in range(rng.randrange(1, 6))]
        matched = tree.match(cursor, keys)
        tree.insert(cursor, keys[len(matched) :], [next(blocks) for _ in keys[len(matched) :]])
        tree.release(cursor)
    owned = tree.check()
    coldest = tree.coldest(rng.randrange(1, 30))
    assert set(coldest) <= tree.check() == owned
    assert len(coldest) == len(set(coldest))
    assert coldest[0] == tree.evict(1)[0]
