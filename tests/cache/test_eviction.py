"""Eviction policies: random histories against an oracle that looks at every leaf, and what the value policy prefers."""

from __future__ import annotations

import random
from array import array
from itertools import count, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.tiered import TieredRequests, tokens_of
from support.virtual_time import run

from kllm.cache import prefix_tree
from kllm.cache.eviction import (
    ATTENTION_SPAN,
    FETCH_PRICE,
    EvictionName,
    EvictionPolicy,
    LeastRecentlyUsed,
    ValueAware,
)
from kllm.cache.manager import KVManager
from kllm.cache.prefix_tree import Node, PrefixCursor, PrefixTree
from kllm.config import EngineConfig
from kllm.engine.assembly import make_scheduler

BLOCK_TOKENS = ATTENTION_SPAN // 8  # the eighth block of a prompt is twice as dear as the first
KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=9)


class LruHistory(RuleBasedStateMachine):
    """Requests come, match and go, and blocks are evicted, one at a time: of all leaves that nobody uses, looked at
    one by one, the victim is the end of one of least value."""

    cursors = Bundle("cursors")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_tree, "MAX_RUN", 4)
        self.copies: set[int] = set()
        self.tree = PrefixTree(self.make_policy())
        self.next_block = 0
        self.held: set[PrefixCursor] = set()

    def make_policy(self) -> EvictionPolicy:
        return LeastRecentlyUsed()

    def value(self, leaf: Node) -> float:
        return leaf.used

    def teardown(self) -> None:
        for cursor in self.held:
            self.tree.release(cursor)
        self.tree.clear()
        assert self.tree.check() == set()
        assert list(self.tree.nodes()) == []
        self.patch.undo()

    def insert(self, cursor: PrefixCursor, keys: list[bytes]) -> None:
        blocks = list(range(self.next_block, self.next_block + len(keys)))
        self.next_block += len(keys)
        self.copies.update(blocks)
        self.tree.insert(cursor, keys, blocks)

    @rule(target=cursors, keys=KEYS, salt=st.sampled_from(["", "salt"]))
    def request(self, keys: list[bytes], salt: str) -> PrefixCursor:
        cursor = self.tree.cursor(salt)
        self.held.add(cursor)
        found = len(self.tree.match(cursor, keys))
        self.tree.note_use(cursor)
        self.insert(cursor, keys[found:])
        return cursor

    @rule(cursor=cursors, keys=KEYS)
    def generate(self, cursor: PrefixCursor, keys: list[bytes]) -> None:
        self.insert(cursor, keys)

    @rule(cursor=consumes(cursors))
    def release(self, cursor: PrefixCursor) -> None:
        self.tree.release(cursor)
        self.held.remove(cursor)

    @rule(keys=KEYS)
    def visit(self, keys: list[bytes]) -> None:
        """A request that is over at once, so that leaves are used again and again."""
        self.release(self.request(keys, ""))

    @rule(first=st.integers(0, 100), count=st.integers(1, 8))
    def lose_copies(self, first: int, count: int) -> None:
        self.copies.difference_update(range(first, first + count))

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        pinned = {block for cursor in self.held for block in self.tree.path(cursor)}
        for _ in range(count):
            leaves = [node for node in self.tree.nodes() if node.blocks and not node.children and not node.locks]
            worth = {leaf.blocks[-1]: self.value(leaf) for leaf in leaves}
            victims = self.tree.evict(1)
            assert len(victims) == min(1, len(leaves))
            for victim in victims:
                assert victim in worth
                assert victim not in pinned
                assert worth[victim] <= min(worth.values()) + 1e-9

    @rule()
    def clear(self) -> None:
        pinned = {block for cursor in self.held for block in self.tree.path(cursor)}
        self.tree.clear()
        assert self.tree.check() == pinned

    @invariant()
    def sound(self) -> None:
        self.tree.check()


class ValueHistory(LruHistory):
    def make_policy(self) -> EvictionPolicy:
        return ValueAware(16, BLOCK_TOKENS)

    def price(self, leaf: Node) -> float:
        return 1 + leaf.end / 8

    def value(self, leaf: Node) -> float:
        return leaf.used + leaf.credit * self.price(leaf) ** 0.25


class TieredValueHistory(ValueHistory):
    """All blocks have a copy below at first; some copies vanish."""

    def make_policy(self) -> EvictionPolicy:
        return ValueAware(16, BLOCK_TOKENS, self.copies.__contains__)

    def price(self, leaf: Node) -> float:
        return FETCH_PRICE if leaf.blocks[-1] in self.copies else super().price(leaf)


TestLru = LruHistory.TestCase
TestValue = ValueHistory.TestCase
TestTieredValue = TieredValueHistory.TestCase
MANY = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLru.settings = TestValue.settings = TestTieredValue.settings = MANY


class Prompts:
    """Prompts of blocks named by numbers, through a KVManager, one at a time."""

    def __init__(self, num_blocks: int, eviction: EvictionName, block_tokens: int = 4) -> None:
        self.kv = KVManager(num_blocks, block_tokens, eviction=eviction)

    def __call__(self, *blocks: int) -> int:
        """Blocks that were cached."""
        width = self.kv.block_tokens
        tokens = array("i", [block for block in blocks for _ in range(width)])
        holding = self.kv.open()
        found = self.kv.match(holding, tokens, len(tokens))
        self.kv.note_use(holding)
        assert self.kv.grow(holding, len(tokens)) is not None
        self.kv.commit(holding, tokens, len(tokens), None)
        self.kv.close(holding)
        return found // width


@pytest.mark.parametrize("eviction", ["lru", "value"])
@pytest.mark.parametrize("number_of", [7, 20, 300])
def test_prompts_that_are_alike_go_in_the_order_they_came(eviction: EvictionName, number_of: int) -> None:
    prompts = Prompts(6, eviction)
    for number in range(number_of):
        assert prompts(number) == 0
    assert [prompts(number) for number in range(number_of - 6, number_of)] == [1] * 6


def test_what_has_come_back_stays_longer() -> None:
    """Two conversations go on among prompts that come once: at first often enough for LRU, later after more new blocks
    than the cache holds."""

    def hits(others: int, conversations: list[int], prompts: Prompts) -> int:
        found = 0
        for conversation in conversations:
            for _ in range(others):
                first = 4 * next(numbers)
                prompts(*range(first, first + 4))
            found += prompts(conversation)
        prompts.kv.check()
        return found

    names: list[tuple[EvictionName, int]] = [("lru", 1), ("value", 100)]
    for eviction, later in names:  # LRU finds one while the gap has not become long
        numbers, prompts = count(100), Prompts(32, eviction)
        assert hits(2, [1, 2] * 50, prompts) == 98
        assert hits(5, [1, 2] * 50, prompts) == later


def test_odds_are_learned_and_forgotten() -> None:
    policy = ValueAware(100, BLOCK_TOKENS)
    leaf = leaf_of(10)
    before = policy.odds(0)
    for _ in range(100):
        policy.lost(leaf, 10, 5)
    low = policy.odds(0)
    assert before == 0.5
    assert low < 0.03
    assert policy.odds(1) == 0.5, "another class"
    for _ in range(100):
        policy.reused(leaf)
    assert policy.odds(0) > 0.8


def leaf_of(end: int, used: int = 0, uses: int = 0, block: int = 0) -> Node:
    leaf = Node(None, [b"k"] * 10, [block] * 10, end)
    leaf.used, leaf.uses = used, uses
    return leaf


def experienced(policy: ValueAware, age: int = 100) -> ValueAware:
    """It has evicted prompts of one block at this age."""
    for _ in range(20):
        leaf = leaf_of(1, used=0)
        policy.value(leaf)
        policy.lost(leaf, 10, age)
    return policy


def test_deep_leaves_stay_longer_but_not_for_ever() -> None:
    policy = experienced(ValueAware(1000, BLOCK_TOKENS))
    values = [policy.value(leaf_of(end)) for end in (1, 8, 32, 128)]
    assert all(shallow < deep for shallow, deep in pairwise(values))
    assert values[-1] < 3 * values[0]
    assert policy.value(leaf_of(128)) < policy.value(leaf_of(1, used=200))


def test_an_inexperienced_policy_is_lru() -> None:
    policy = ValueAware(1000, BLOCK_TOKENS)
    assert policy.value(leaf_of(500, used=3, uses=9)) == 3


def test_a_flush_teaches_nothing() -> None:
    prompts = Prompts(8, "value")
    for number in range(8):
        prompts(number)
    policy = prompts.kv.tree.policy
    assert isinstance(policy, ValueAware)
    odds = policy.odds(0)
    prompts.kv.clear()
    assert policy.odds(0) == odds
    prompts.kv.check()


def test_a_leaf_with_a_copy_below_goes_before_one_without() -> None:
    copies = {1}
    policy = experienced(ValueAware(1000, BLOCK_TOKENS, copies.__contains__))
    copied, alone = leaf_of(1, block=1), leaf_of(1, block=2)
    first, second = policy.value(copied), policy.value(alone)
    assert policy.reconsider(copied, first) == first
    assert policy.reconsider(alone, second) > first
    copies.clear()
    assert policy.reconsider(copied, first) == policy.reconsider(alone, second)


def test_uses_go_with_the_conversation_and_not_with_a_branch() -> None:
    tree = PrefixTree()
    keys = [number.to_bytes(4, "little") for number in range(2 * prefix_tree.MAX_RUN)]

    def request(length: int, *other: bytes) -> Node:
        cursor = tree.cursor()
        found = len(tree.match(cursor, keys[:length]))
        tree.note_use(cursor)
        new = keys[found:length] + list(other)
        tree.insert(cursor, new, list(range(tree.num_blocks, tree.num_blocks + len(new))))
        node = cursor.node
        tree.release(cursor)
        return node

    assert [request(length).uses for length in (10, 20, 300, 512)] == [0, 1, 2, 3]
    assert request(5, b"branch").uses == 0
    assert request(5, b"branch").uses == 0, "only the first five blocks were used again"
    assert request(512).uses == 4


@pytest.mark.parametrize("eviction", ["lru", "value"])
def test_every_block_is_in_one_place_whatever_comes(eviction: EvictionName) -> None:
    prompts = Prompts(40, eviction, 1)
    rng = random.Random(5)
    for _ in range(600):
        prompts(*(rng.choice((0, 0, 0, 1)) for _ in range(rng.randrange(1, 30))))
        prompts.kv.check()


def test_the_manager_knows_what_the_tiers_below_hold() -> None:
    async def main() -> None:
        cache = TieredRequests(num_blocks=8, num_slots=2, eviction="value")
        tokens = tokens_of(1, 2, 3)
        cache.use(tokens)
        holding = cache.kv.open()
        cache.kv.match(holding, tokens, len(tokens))
        assert [cache.kv.has_copy(block) for block in holding.blocks] == [False] * 3
        await cache.settle()
        assert [cache.kv.has_copy(block) for block in holding.blocks].count(True) == 2
        cache.kv.close(holding)
        await cache.close()

    run(main())
    assert Prompts(8, "value").kv.has_copy(0) is None


@pytest.mark.parametrize(("name", "policy"), [("lru", LeastRecentlyUsed), ("value", ValueAware)])
def test_the_engine_config_names_the_policy(name: EvictionName, policy: type) -> None:
    config = EngineConfig(model="any", cache_eviction=name)
    scheduler = make_scheduler(config, num_blocks=8, max_model_len=64, eos_token_ids=())
    assert isinstance(scheduler.kv.tree.policy, policy)
