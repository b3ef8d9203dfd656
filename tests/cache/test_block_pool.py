from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kllm.cache.block_pool import FILLING, FREE, LEAVING, READY, BlockPool, BlockStateError


class BlockPoolMachine(RuleBasedStateMachine):
    """Every block is where the caller put it, whatever the order of operations."""

    NUM_BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.pool.set_reclaimer(self._reclaim, lambda: len(self.ready))
        self.free = set(range(self.NUM_BLOCKS))
        self.filling: list[int] = []
        self.ready: list[int] = []
        self.fenced: dict[int, list[int]] = {}
        self.committed = -1

    def _reclaim(self, count: int) -> list[int]:
        given, self.ready = self.ready[:count], self.ready[count:]
        return given

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        room = len(self.free) + len(self.ready)
        held = set(self.ready)
        blocks = self.pool.allocate(count)
        if count > room:
            assert blocks is None
            assert set(self.ready) == held
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert set(blocks) <= self.free | (held - set(self.ready))
        self.free = (self.free | (held - set(self.ready))) - set(blocks)
        self.filling += blocks

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = self._take(data, self.filling)
        self.pool.publish(blocks)
        self.ready += blocks

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), ahead=st.none() | st.integers(1, 3))
    def release(self, data: st.DataObject, ahead: int | None) -> None:
        blocks = self._take(data, self.filling)
        fence = None if ahead is None else self.committed + ahead
        self.pool.release(blocks, fence)
        if fence is None:
            self.free |= set(blocks)
        else:
            self.fenced.setdefault(fence, []).extend(blocks)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def recycle(self, data: st.DataObject) -> None:
        blocks = self._take(data, self.ready)
        self.pool.recycle(blocks)
        self.free |= set(blocks)

    @rule()
    def commit(self) -> None:
        self.committed += 1
        self.pool.passed(self.committed)
        self.free |= set(self.fenced.pop(self.committed, []))

    def _take(self, data: st.DataObject, blocks: list[int]) -> list[int]:
        taken = data.draw(st.lists(st.sampled_from(blocks), unique=True, min_size=1, max_size=4))
        for block in taken:
            blocks.remove(block)
        return taken

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        leaving = {block for blocks in self.fenced.values() for block in blocks}
        assert self.pool.blocks_in(FREE) == self.free
        assert self.pool.blocks_in(FILLING) == set(self.filling)
        assert self.pool.blocks_in(READY) == set(self.ready)
        assert self.pool.blocks_in(LEAVING) == leaving
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_leaving == len(leaving)
        assert self.pool.available == len(self.free) + len(self.ready)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def in_state(pool: BlockPool, state: int) -> int:
    """A block in that state."""
    allocated = pool.allocate(1)
    assert allocated is not None
    if state == FREE:
        pool.release(allocated)
    elif state == READY:
        pool.publish(allocated)
    elif state == LEAVING:
        pool.release(allocated, 0)
    return allocated[0]


@pytest.mark.parametrize(
    ("state", "operation"),
    [
        *((state, "publish") for state in (FREE, READY, LEAVING)),
        *((state, "release") for state in (FREE, READY, LEAVING)),
        *((state, "retire") for state in (FREE, READY, LEAVING)),
        *((state, "recycle") for state in (FREE, FILLING, LEAVING)),
    ],
)
def test_a_wrong_transition_raises(state: int, operation: str) -> None:
    pool = BlockPool(4)
    block = in_state(pool, state)
    arguments = ([block], 7) if operation == "retire" else ([block],)
    move = pool.release if operation == "retire" else getattr(pool, operation)
    with pytest.raises(BlockStateError, match=f"block {block} is "):
        move(*arguments)
    assert block in pool.blocks_in(state)
    pool.check()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(0) == []
    assert pool.allocate(5) is None
    assert pool.available == 4
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_the_reclaimer_is_asked_only_for_what_is_missing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    pool.publish(blocks)
    asked: list[int] = []

    def reclaim(count: int) -> list[int]:
        asked.append(count)
        return blocks[:count]

    pool.set_reclaimer(reclaim, lambda: 3)
    assert set(pool.allocate(2) or []) == {3, blocks[0]}
    assert asked == [1]


def test_a_reclaimer_that_promised_too_much_is_a_bug() -> None:
    pool = BlockPool(1)
    pool.set_reclaimer(lambda count: [], lambda: 1)
    with pytest.raises(BlockStateError, match="fewer blocks"):
        pool.allocate(2)


def test_a_fence_falls_with_its_own_plan_whatever_was_fenced_before() -> None:
    pool = BlockPool(3)
    late, early, both = (pool.allocate(1) or [] for _ in range(3))
    pool.release(late, 5)
    pool.release(early, 4)
    pool.release(both, 5)
    pool.passed(3)
    assert pool.num_free == 0
    pool.passed(4)
    assert pool.blocks_in(FREE) == set(early)
    pool.passed(5)
    assert pool.num_free == 3
    pool.check()


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(BlockStateError, match="free list"):
        pool.check()
    pool = BlockPool(2)
    pool.release(pool.allocate(1) or [], 3)
    pool._leaving = 0
    with pytest.raises(BlockStateError, match="fences"):
        pool.check()
