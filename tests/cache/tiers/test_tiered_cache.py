"""L1, L2 and L3 together: what went down comes back up, unchanged, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.page_memory import DictStore
from support.tiered import BLOCK_TOKENS, TieredRequests, tokens_of
from support.virtual_time import run

from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from kllm.cache.stores.store import StoreError
from kllm.cache.tiers.settings import TierSettings

A, B = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)


def test_l2_holds_what_l1_evicted() -> None:
    async def main() -> None:
        cache = TieredRequests(num_blocks=6, num_slots=16)
        assert await cache.request(A) == 0
        await cache.settle()
        assert await cache.request(B) == 0  # pushes A out of L1
        await cache.settle()
        brought = await cache.look_up(A)
        assert brought is not None
        assert brought.l2 > 0
        assert cache.use(A) == 4
        counts = cache.tiers.snapshot()
        assert counts.saved == 8
        assert counts.loaded == brought.l2
        assert counts.l1_lost == 0
        await cache.close()

    run(main())


def test_l3_outlives_the_instance_and_is_shared() -> None:
    async def main() -> None:
        store = DictStore()
        first = TieredRequests(8, 8, store)
        await first.request(A)
        await first.close()
        second = TieredRequests(8, 8, DictStore(store.pages))
        brought = await second.look_up(A)
        assert brought is not None
        assert (brought.l1, brought.l2, brought.l3) == (0, 0, 4)
        assert second.use(A) == 4
        await second.close()

    run(main())


def test_tenants_do_not_meet_in_any_tier() -> None:
    async def main() -> None:
        store = DictStore()
        first = TieredRequests(8, 8, store)
        await first.request(A, salt="one")
        await first.close()
        second = TieredRequests(8, 8, store)
        brought = await second.look_up(A, salt="two")
        assert brought is not None
        assert brought.l3 == 0
        assert second.use(A, salt="two") == 0
        assert await second.request(A, salt="two") == 4
        await second.close()

    run(main())


def test_without_a_store_a_miss_is_not_held_up() -> None:
    async def main() -> None:
        cache = TieredRequests(8, 8)
        assert await cache.look_up(A) is None
        await cache.request(A)
        assert await cache.look_up(A) is None  # L1 has all of it
        await cache.close()

    run(main())


def test_two_requests_share_one_fetch() -> None:
    async def main() -> None:
        store = DictStore(delay=lambda: 0.01)
        first = TieredRequests(8, 8, store)
        await first.request(A)
        await first.close()
        store.calls = 0
        second = TieredRequests(12, 8, store, delay=lambda: 0.01)
        one, two = await asyncio.gather(second.look_up(A), second.look_up(A))
        assert one is not None
        assert two is not None
        assert (one.l3, two.l2 + two.l3) == (4, 0)
        assert second.tiers.snapshot().loaded == 4
        assert second.use(A) == 4
        await second.close()

    run(main())


def test_a_slow_store_does_not_hold_a_request_longer_than_its_deadline() -> None:
    async def main() -> None:
        store = DictStore()
        first = TieredRequests(8, 8, store)
        await first.request(A)
        await first.close()
        loop = asyncio.get_running_loop()
        slow = DictStore(store.pages, delay=lambda: 30.0)
        second = TieredRequests(8, 8, slow, TierSettings(predict=False, fetch_base_s=0.5, fetch_per_kilotoken_s=0.0))
        for number in range(3):
            began = loop.time()
            assert await second.request(tokens_of(10 + number, 20)) == 0
            assert loop.time() - began <= 0.5 + 1e-9
        began = loop.time()
        assert await second.look_up(A) is None  # it is left alone now
        assert loop.time() == began
        counts = second.tiers.snapshot()
        assert counts.late == 3
        assert counts.store_down == 1
        await second.close()

    run(main())


@pytest.mark.parametrize("what", ["broken", "full"])
def test_a_store_that_fails_costs_no_request(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = DictStore()
        cache = TieredRequests(6, 16, store)
        setattr(store, what, True)
        await cache.request(A)
        await cache.settle()
        await cache.request(B)
        await cache.settle()
        assert await cache.request(A) == 4  # from L2
        counts = cache.tiers.snapshot()
        assert counts.store_errors > 0
        assert counts.stores_dropped > 0
        assert counts.store_down == 1
        setattr(store, what, False)
        await asyncio.sleep(100.0)
        await cache.request(tokens_of(9, 10))
        await cache.settle()
        assert cache.tiers.snapshot().stored > 0
        assert cache.tiers.snapshot().store_down == 0
        await cache.close()

    run(main())
    assert f"the store is {what}" in caplog.text
    assert "works again" in caplog.text


def test_lookups_let_go_of_l1_when_a_request_needs_it() -> None:
    async def main() -> None:
        store = DictStore(delay=lambda: 10.0)
        patient = TierSettings(predict=False, fetch_base_s=100.0)
        cache = TieredRequests(5, 16, store, patient)
        await asyncio.wait_for(cache.look_up(tokens_of(77)), 200)
        cache.use(A)
        waiting = asyncio.ensure_future(cache.look_up(tokens_of(1, 2, 3, 4, 55)))  # holds A's blocks while it asks
        await asyncio.sleep(1.0)
        assert cache.tiers.lending
        assert cache.kv.available == 1
        assert cache.use(B) == 0  # all of A had to go
        assert await waiting is not None
        await cache.close()

    run(main())


def test_selective_writes_wait_for_reuse() -> None:
    async def main() -> None:
        cache = TieredRequests(16, 16, None, TierSettings(write="selective", min_reuse=2, predict=False))
        await cache.request(A)
        await cache.settle()
        assert cache.tiers.snapshot().saved == 0
        await cache.request(A)
        await cache.settle()
        assert cache.tiers.snapshot().saved == 4
        await cache.close()

    run(main())


def test_back_writes_what_is_about_to_go() -> None:
    async def main() -> None:
        cache = TieredRequests(16, 64, None, TierSettings(write="back", predict=False))
        for number in range(10):
            await cache.request(tokens_of(4 * number, 4 * number + 1, 4 * number + 2, 4 * number + 3))
            await cache.settle()
        counts = cache.tiers.snapshot()
        assert counts.l1_evicted > 0
        assert counts.l1_lost == 0
        await cache.close()

    run(main())


def test_the_store_gets_only_what_was_reused() -> None:
    async def main() -> None:
        store = DictStore()
        cache = TieredRequests(16, 16, store, TierSettings(store_min_reuse=2, predict=False))
        await cache.request(A)
        await cache.request(B)
        await cache.settle()
        assert not store.pages
        await cache.request(A)
        await cache.settle()
        assert len(store.pages) == 4
        await cache.close()

    run(main())


def test_events_tell_which_tier_holds_what() -> None:
    async def main() -> None:
        store = DictStore()
        cache = TieredRequests(5, 5, store)
        await cache.request(A)
        await cache.request(B)
        await cache.settle()
        held: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        for event in cache.events:
            if isinstance(event, BlockStored):
                held[event.medium] |= set(event.hashes)
            elif isinstance(event, BlockRemoved):
                held[event.medium] -= set(event.hashes)
        assert held[Medium.DEVICE] == set(cache.kv._block_of)
        assert held[Medium.HOST] == set(cache.tiers._pool._blocks)
        assert {key[:16] for key in store.pages} == held[Medium.STORAGE]
        await cache.close()

    run(main())


def test_clear_forgets_every_tier() -> None:
    async def main() -> None:
        store = DictStore()
        cache = TieredRequests(8, 8, store)
        await cache.request(A)
        await cache.settle()
        assert cache.kv.clear()
        await cache.tiers.clear(store=True)
        assert not store.pages
        assert await cache.request(A) == 0
        await cache.close()

    run(main())


def test_clear_waits_for_copies_and_says_whether_something_is_left() -> None:
    async def main() -> None:
        store = DictStore(delay=lambda: 0.1)
        cache = TieredRequests(8, 8, store, delay=lambda: 0.1)
        assert cache.use(A) == 0
        await asyncio.sleep(0.05)  # it is being copied down
        assert await cache.tiers.clear(store=False)
        assert AllBlocksCleared() not in cache.events, "the store may have it"
        await cache.request(A)
        await cache.settle()
        holding = cache.kv.open()
        assert cache.kv.match(holding, A, len(A)) > 0
        assert not await cache.tiers.clear(store=True), "a request uses it"
        assert AllBlocksCleared() not in cache.events
        cache.kv.close(holding)
        assert await cache.tiers.clear(store=True)
        assert cache.events[-1] == AllBlocksCleared()
        assert not store.pages
        assert await cache.request(A) == 0
        await cache.settle()
        store.broken = True
        with pytest.raises(StoreError):
            await cache.tiers.clear(store=True)
        assert cache.use(A) == 0, "memory is cleared all the same"
        await cache.close()

    run(main())


def test_tokens_that_the_device_lacks_are_counted_where_they_are_looked_up() -> None:
    async def main() -> None:
        cache = TieredRequests(8, 8)
        missing = (len(A) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert await cache.look_up(A) is None, "nothing is there"
        assert cache.tiers.snapshot().lookup_tokens == missing
        cache.use(A)
        assert await cache.look_up(A) is None, "nothing is missing"
        assert cache.tiers.snapshot().lookup_tokens == missing
        await cache.close()

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(6, 24),
    slots=st.integers(2, 24),
    write=st.sampled_from(["through", "selective", "back"]),
    with_store=st.booleans(),
)
def test_whatever_is_served_is_right(seed: int, blocks: int, slots: int, write: str, with_store: bool) -> None:
    """Random prompts with shared prefixes, at once, with copies and a store of random speed that fails at times, over
    three incarnations of the instance: `use` checks every page it takes from the cache."""
    rng = random.Random(seed)
    store = DictStore(delay=lambda: rng.choice([0.0, 0.001, 0.3]))

    async def client(cache: TieredRequests, number: int) -> None:
        for _ in range(6):
            await asyncio.sleep(rng.random() * 0.05)
            prefix = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
            salt = rng.choice(["", "tenant"])
            store.broken = with_store and rng.random() < 0.05
            await cache.request(tokens_of(*prefix), salt)
            cache.check()

    async def main() -> None:
        for _ in range(3):
            cache = TieredRequests(
                blocks,
                slots,
                store if with_store else None,
                TierSettings(write=write, min_reuse=2, predict=rng.random() < 0.5),  # type: ignore[arg-type]
                delay=lambda: rng.choice([0.0, 0.001, 0.01]),
            )
            await asyncio.gather(*(client(cache, number) for number in range(4)))
            store.broken = False
            await cache.close()
            assert not cache.tiers.lending

    run(main())


def test_where_l2_is_only_a_passage_blocks_wait_for_the_store() -> None:
    """More blocks at once than L2 has slots, and a store that is slower than the copies: none is dropped."""

    async def main() -> None:
        store = DictStore(delay=lambda: 0.05)
        cache = TieredRequests(64, 4, store, TierSettings(staging=True, predict=False))
        await cache.request(tokens_of(*range(40)))
        await cache.settle()
        assert len(store.pages) == 40
        assert cache.tiers.snapshot().stores_dropped == 0
        await cache.close()

    run(main())


def test_where_l2_is_only_a_passage_what_is_about_to_go_is_written_once() -> None:
    """L1 is full, so that its coldest blocks are always about to go; that L2 gave them up does not bring them back."""

    async def main() -> None:
        store = DictStore(delay=lambda: 0.01)
        cache = TieredRequests(48, 12, store, TierSettings(write="back", staging=True, predict=False))
        for number in range(30):
            await cache.request(tokens_of(*range(100 + 4 * number, 104 + 4 * number)))
            await asyncio.wait_for(cache.settle(), timeout=5.0)
        counts = cache.tiers.snapshot()
        assert counts.l1_evicted > 48
        assert counts.saved == counts.stored == len(store.pages) > 48
        await cache.close()

    run(main())


def test_whoever_waits_for_a_copy_to_end_hears_of_it_before_the_lookup_ends() -> None:
    """While blocks are copied into L1 a request that needs one can only wait; the next batch may be long in coming."""

    class SlowAfterTheFirst(DictStore):
        async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
            if self.calls > 1:
                await asyncio.sleep(60.0)
            return await super().get(keys, into)

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), DictStore()
        first = TieredRequests(16, 16, store)
        await first.request(tokens_of(*range(8)))
        await first.close()
        slow = SlowAfterTheFirst(store.pages)
        settings = TierSettings(write="selective", predict=False, fetch_base_s=5.0)
        second = TieredRequests(16, 16, slow, settings, delay=lambda: 0.05)
        woken: list[tuple[float, bool]] = []
        second.tiers.wake = lambda: woken.append((loop.time(), second.tiers.copying))
        began = loop.time()
        brought = await second.look_up(tokens_of(*range(8)))
        assert brought is not None
        assert brought.l3 == 4
        assert loop.time() - began >= 5.0
        assert [copying for when, copying in woken if when - began < 1.0] == [False]
        await second.close()

    run(main())


def test_l2_gives_up_a_prefix_from_its_end() -> None:
    """Also after L1 has evicted it, which L2 counts as its last use."""

    async def main() -> None:
        cache, prompt = TieredRequests(10, 24), tokens_of(*range(1, 9))
        await cache.request(prompt)
        await cache.settle()
        await cache.request(tokens_of(*range(20, 28)))  # pushes it out of L1
        await cache.settle()
        evicted, number = cache.tiers.snapshot().l2_evicted, 30
        while cache.tiers.snapshot().l2_evicted == evicted:
            await cache.request(tokens_of(number))
            await cache.settle()
            number += 1
        gone = cache.tiers.snapshot().l2_evicted - evicted
        brought = await cache.look_up(prompt)
        assert brought is not None
        assert brought.l2 == 8 - gone > 0
        await cache.close()

    run(main())


def test_what_finds_no_slot_is_saved_when_there_is_one() -> None:
    async def main() -> None:
        cache = TieredRequests(32, 4, settings=TierSettings(write="through", predict=False))
        pool = cache.tiers._pool
        await cache.request(tokens_of(*range(4)))
        await cache.settle()
        pinned = [block for name in pool.ready() if (block := pool.get(name)) is not None]
        pool.pin(pinned)
        await cache.request(tokens_of(*range(10, 14)))
        await asyncio.sleep(1.0)
        assert cache.tiers.snapshot().saved == 4
        pool.unpin(pinned)
        await cache.settle()
        counts = cache.tiers.snapshot()
        assert (counts.saved, counts.saves_dropped) == (8, 0)
        await cache.close()

    run(main())


def test_what_cannot_be_written_is_dropped_without_holding_up_the_loop() -> None:
    async def main() -> None:
        store = DictStore(delay=lambda: 10.0)
        cache = TieredRequests(300, 300, store, TierSettings(predict=False))
        await cache.request(tokens_of(*range(250)))
        await asyncio.sleep(5.0)  # the first batch is being written, the others wait
        cache.tiers.hold_writes(True)
        turns = most = 0
        while cache.tiers.snapshot().stores_dropped < 100:
            before = cache.tiers.snapshot().stores_dropped
            await asyncio.sleep(0 if before else 0.5)
            most = max(most, cache.tiers.snapshot().stores_dropped - before)
            turns += 1
        assert most <= 64
        cache.tiers.hold_writes(False)
        await cache.close()

    run(main())
