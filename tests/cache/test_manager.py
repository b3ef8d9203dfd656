from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import pytest

from kllm.cache.block_pool import BlockStateError
from kllm.cache.manager import Holding, KVManager

WIDTH = 4


def tokens_of(*blocks: int, tail: int = 0) -> array[int]:
    """Whole blocks of equal tokens, then `tail` zeros."""
    return array("i", [token for block in blocks for token in [block] * WIDTH] + [0] * tail)


def fill(kv: KVManager, tokens: array[int], salt: str = "", adapter: str = "") -> Holding:
    """A holding whose tokens are all computed."""
    holding = kv.open(salt, adapter)
    kv.match(holding, tokens, len(tokens))
    assert kv.grow(holding, len(tokens)) is not None
    assert kv.commit(holding, tokens, len(tokens), None) == []
    kv.check()
    return holding


def test_grow_gives_blocks_for_all_tokens_or_none() -> None:
    kv = KVManager(3, WIDTH)
    holding = kv.open()
    assert len(kv.grow(holding, 5) or []) == 2
    assert kv.grow(holding, 8) == []
    assert kv.grow(holding, 13) is None
    assert len(holding.blocks) == 2
    assert len(kv.grow(holding, 12) or []) == 1
    assert kv.available == 0
    kv.check()


def test_only_full_blocks_enter_the_tree() -> None:
    kv = KVManager(8, WIDTH)
    tokens = tokens_of(1, 2, tail=3)
    holding = fill(kv, tokens)
    assert holding.shared == 2
    kv.close(holding)
    assert (kv.tree.evictable, kv.pool.num_free, kv.available) == (2, 6, 8)
    again = kv.open()
    assert kv.match(again, tokens, len(tokens)) == 8
    assert again.blocks == holding.blocks[:2]


def test_a_match_stays_within_its_limit() -> None:
    kv = KVManager(8, WIDTH)
    tokens = tokens_of(1, 2, 3)
    kv.close(fill(kv, tokens))
    for limit, gained in ((12, 12), (11, 8), (4, 4), (3, 0), (0, 0)):
        holding = kv.open()
        assert kv.match(holding, tokens, limit) == gained
        kv.check()
        kv.close(holding)


def test_a_match_continues_where_the_holding_stands() -> None:
    kv = KVManager(20, WIDTH)
    tokens = tokens_of(1, 2, 3, 4)
    holding = kv.open()
    kv.grow(holding, 4)
    kv.commit(holding, tokens, 4, None)
    fill(kv, tokens)
    assert kv.match(holding, tokens, 15) == 8
    kv.grow(holding, 16)
    assert kv.match(holding, tokens, 16) == 0, "private blocks follow: nothing can be put between"
    kv.check()


def test_a_match_does_not_fragment_the_tree() -> None:
    """Only a prefix that really ends inside a run cuts it."""
    kv = KVManager(2000, WIDTH)
    tokens = tokens_of(*range(1000))
    kv.close(fill(kv, tokens))
    nodes = len(list(kv.tree.nodes()))
    for limit in (4000, 3999, 4000):
        holding = kv.open()
        kv.match(holding, tokens, limit)
        kv.close(holding)
    assert len(list(kv.tree.nodes())) == nodes + 1


@pytest.mark.parametrize("fence", [None, 7])
def test_duplicates_are_remapped_and_freed_once_their_plan_has_committed(fence: int | None) -> None:
    kv = KVManager(12, WIDTH)
    tokens = tokens_of(1, 2, 3)
    first, second = kv.open(), kv.open()
    kv.grow(first, 12)
    kv.grow(second, 12)
    own = second.blocks.copy()
    assert kv.commit(first, tokens, 8, None) == []
    assert kv.commit(second, tokens, 12, fence) == [(0, first.blocks[0]), (1, first.blocks[1])]
    assert second.blocks == [*first.blocks[:2], own[2]]
    assert kv.pool.num_leaving == (0 if fence is None else 2)
    assert kv.fenced == (fence is not None)
    kv.check()
    if fence is not None:
        kv.passed(fence - 1)
        assert kv.pool.num_leaving == 2
        kv.passed(fence)
    assert (kv.pool.num_free, kv.fenced) == (8, False)
    assert kv.commit(first, tokens, 12, None) == [(2, own[2])]
    kv.check()


def test_a_fenced_close_keeps_blocks_and_path_until_the_plan_has_committed() -> None:
    kv = KVManager(4, WIDTH)
    holding = fill(kv, tokens_of(1, 2, tail=1))
    kv.close(holding, 3)
    assert (kv.available, kv.tree.evictable, kv.fenced) == (1, 0, True)
    kv.check()
    kv.passed(2)
    assert kv.available == 1
    kv.passed(3)
    assert (kv.available, kv.tree.evictable, kv.fenced) == (4, 2, False)
    kv.check()


def test_fences_fall_in_the_order_of_plans_not_of_closing() -> None:
    kv = KVManager(6, WIDTH)
    one, two = fill(kv, tokens_of(1, tail=1)), fill(kv, tokens_of(2, tail=1))
    kv.close(one, 5)
    kv.close(two, 4)
    kv.passed(4)
    assert (kv.pool.num_leaving, kv.tree.evictable) == (1, 1)
    kv.passed(5)
    assert kv.available == 6


def test_tenants_share_nothing() -> None:
    kv = KVManager(20, WIDTH)
    tokens = tokens_of(1, 2)
    fill(kv, tokens, "a", "x")
    for salt, adapter in (("", ""), ("b", "x"), ("a", ""), ("a", "y")):
        assert kv.match(kv.open(salt, adapter), tokens, 8) == 0
    assert kv.match(kv.open("a", "x"), tokens, 8) == 8


def test_without_prefix_caching_every_block_is_private() -> None:
    kv = KVManager(4, WIDTH, enable_prefix_caching=False)
    tokens = tokens_of(1, 2)
    holding = fill(kv, tokens)
    other = kv.open()
    assert kv.match(other, tokens, 8) == 0
    assert (holding.shared, kv.tree.num_blocks, kv.usage, kv.cached) == (0, 0, 0.5, 0.0)
    kv.close(holding)
    assert kv.available == 4


def test_usage_counts_what_requests_hold_and_cached_what_only_the_tree_holds() -> None:
    kv = KVManager(8, WIDTH)
    holding = fill(kv, tokens_of(1, 2, tail=1))
    assert (kv.usage, kv.cached) == (3 / 8, 0.0)
    kv.close(holding)
    assert (kv.usage, kv.cached) == (0.0, 2 / 8)


def test_clear_forgets_what_no_request_uses() -> None:
    kv = KVManager(8, WIDTH)
    held = fill(kv, tokens_of(1, 2))
    kv.close(fill(kv, tokens_of(1, 3)))
    kv.clear()
    assert (kv.tree.num_blocks, kv.available) == (2, 6)
    kv.check()
    kv.close(held)
    kv.clear()
    assert (kv.tree.num_blocks, kv.pool.num_free) == (0, 8)
    kv.check()


def test_growing_evicts_cached_blocks_but_never_pinned_ones() -> None:
    kv = KVManager(6, WIDTH)
    held = fill(kv, tokens_of(1, 2))
    kv.close(fill(kv, tokens_of(1, 3)))
    kv.close(fill(kv, tokens_of(4, 5, 6)))
    other = kv.open()
    assert kv.grow(other, 5 * WIDTH) is None
    assert kv.grow(other, 4 * WIDTH) is not None
    assert not set(other.blocks) & set(held.blocks)
    assert kv.available == 0
    kv.check()


def test_closing_twice_is_a_bug() -> None:
    kv = KVManager(2, WIDTH)
    holding = kv.open()
    kv.close(holding)
    with pytest.raises(KeyError):
        kv.close(holding)


def test_check_notices_a_block_in_two_holdings() -> None:
    kv = KVManager(4, WIDTH)
    one, two = kv.open(), kv.open()
    kv.grow(one, 4)
    two.blocks += one.blocks
    with pytest.raises((AssertionError, BlockStateError)):
        kv.check()


@dataclass
class Open:
    """A request of the random test."""

    tenant: str
    tokens: array[int]
    holding: Holding
    computed: int

    def prefix(self, index: int) -> tuple[object, ...]:
        """What the KV of its block `index` depends on."""
        return (self.tenant, *self.tokens[: (index + 1) * WIDTH])


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_always_find_the_blocks_of_their_own_tokens(seed: int) -> None:
    """written[block] is the prefix whose KV lies there. Up to three plans are in flight; number `plan` commits next."""
    rng = random.Random(seed)
    kv = KVManager(40, WIDTH)
    written: dict[int, tuple[object, ...]] = {}
    requests: list[Open] = []
    plan = 0
    for _ in range(1500):
        action = rng.random()
        if action < 0.3 and len(requests) < 8:
            tokens = tokens_of(*(rng.randrange(3) for _ in range(rng.randrange(1, 9))), tail=rng.randrange(WIDTH))
            holding = kv.open(tenant := rng.choice(("", "salt")))
            requests.append(Open(tenant, tokens, holding, kv.match(holding, tokens, len(tokens) - 1)))
        elif action < 0.8 and requests:
            request = rng.choice(requests)
            upto = min(len(request.tokens), request.computed + rng.randrange(1, 10))
            if kv.grow(request.holding, upto) is None:
                continue
            for index in range(request.holding.shared, len(request.holding.blocks)):
                written[request.holding.blocks[index]] = request.prefix(index)
            kv.commit(request.holding, request.tokens, upto, rng.choice((None, plan + rng.randrange(3))))
            request.computed = upto
        elif action < 0.95 and requests:
            request = requests.pop(rng.randrange(len(requests)))
            kv.close(request.holding, rng.choice((None, plan + rng.randrange(3))))
        else:
            kv.passed(plan)
            plan += 1
        kv.check()
        for request in requests:
            for index in range(request.computed // WIDTH):
                assert written[request.holding.blocks[index]] == request.prefix(index)
    for request in requests:
        kv.close(request.holding)
    kv.passed(plan + 3)
    assert kv.available == 40
