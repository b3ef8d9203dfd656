"""KV from the L2 of one instance into that of another: only what is lacking, only what is right, never at the price of
anybody's waiting."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_transfer import MemoryNetwork
from support.page_memory import DictStore
from support.tiered import BLOCK_TOKENS, TieredRequests, tokens_of
from support.virtual_time import run

from kllm.cache.tiers.settings import TierSettings
from kllm.messages import KvSource

A, B = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
ASKED = TierSettings(staging=True, write="asked", predict=False)


def pair(
    network: MemoryNetwork, slots: int = 16, blocks: int = 16, settings: TierSettings = ASKED
) -> tuple[TieredRequests, TieredRequests]:
    """P and D."""
    return (
        TieredRequests(blocks, slots, settings=settings, network=network),
        TieredRequests(blocks, slots, settings=settings, network=network),
    )


async def close(*caches: TieredRequests) -> None:
    for cache in caches:
        await cache.close()


def test_what_one_computed_the_other_takes() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.use(A)
        source = await p.export(A)
        assert source is not None
        assert len(source.slots) == 4
        brought = await d.look_up(A, source=source)
        assert brought is not None
        assert (brought.l1, brought.l2, brought.peer, brought.l3) == (0, 0, 4, 0)
        assert d.use(A) == 4
        assert (p.tiers.leases, d.tiers.leases) == (1, 0)
        p.tiers.release([source.lease, "unknown"])
        assert p.tiers.leases == 0
        assert p.tiers.snapshot().exported == 4
        counts = d.tiers.snapshot()
        assert (counts.pulled, counts.bytes_pulled, counts.pull_failures) == (4, 4 * d.mover.page_bytes, 0)
        await close(p, d)

    run(main())


def test_only_what_is_to_be_exported_is_copied_where_l2_is_a_passage() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.use(A)
        p.use(B)
        await p.settle()
        assert p.tiers.snapshot().saved == 0
        assert await p.export(A) is not None
        assert p.tiers.snapshot().saved == 4
        await close(p, d)

    run(main())


def test_chunks_are_copied_while_the_prefill_runs() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.mover._delay = lambda: 1.0
        holding = p.kv.open()
        p.kv.grow(holding, len(A))
        first = 0
        for blocks in (1, 3, 4):
            p.kv.commit(holding, A, blocks * BLOCK_TOKENS, None)
            first = p.tiers.export_soon(holding, first)
            assert first == blocks
            await p.settle()
        began = asyncio.get_running_loop().time()
        source = await p.export(A)
        assert asyncio.get_running_loop().time() - began < 0.1, "all was there already"
        assert source is not None
        assert len(source.slots) == 4
        p.kv.close(holding)
        await close(p, d)

    run(main())


def test_only_what_is_lacking_is_read() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        p, d = pair(network)
        p.use(A)
        d.use(tokens_of(1, 2))
        source = await p.export(A)
        brought = await d.look_up(A, source=source)
        assert brought is not None
        assert (brought.l1, brought.peer) == (2, 2)
        assert d.transfer is not None
        assert d.transfer.pages_read == 2
        assert await d.look_up(A, source=source) is None, "it has all of it"
        await close(p, d)

    run(main())


def test_the_store_has_what_follows() -> None:
    async def main() -> None:
        network, store = MemoryNetwork(), DictStore()
        p = TieredRequests(16, 16, settings=ASKED, network=network)
        d = TieredRequests(16, 16, store, network=network)
        other = TieredRequests(16, 16, store)
        await other.request(tokens_of(1, 2, 3, 4, 5, 6))
        await other.close()
        p.use(A)
        brought = await d.look_up(tokens_of(1, 2, 3, 4, 5, 6), source=await p.export(A))
        assert brought is not None
        assert (brought.peer, brought.l3) == (4, 2)
        assert d.use(tokens_of(1, 2, 3, 4, 5, 6)) == 6
        await close(p, d)

    run(main())


def test_nothing_is_exported_of_less_than_a_block_or_what_is_gone() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork(), blocks=6)
        assert await p.export(tokens_of(1)[: BLOCK_TOKENS - 1]) is None
        assert await p.export(A) is None, "never computed"
        p.use(A)
        p.use(tokens_of(5, 6, 7))  # needs blocks of A: its end is gone
        source = await p.export(A)
        assert source is not None
        assert 0 < len(source.slots) < 4
        assert await d.request(A, source=source) == len(source.slots)
        await close(p, d)

    run(main())


def test_damaged_pages_are_computed_again() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        p, d = pair(network)
        p.use(A)
        source = await p.export(A)
        arrived = count()

        def damage(page: bytearray) -> None:
            if next(arrived) == 2:
                page[3] ^= 16

        network.damage = damage
        assert await d.request(A, source=source) == 2
        counts = d.tiers.snapshot()
        assert (counts.pulled, counts.pull_failures, counts.pull_corrupt) == (2, 1, 1)
        await close(p, d)

    run(main())


def test_what_is_overwritten_while_it_is_read_is_computed_again() -> None:
    async def main() -> None:
        network = MemoryNetwork(lambda: 0.1)
        p = TieredRequests(16, 4, settings=ASKED, network=network)
        d = TieredRequests(16, 16, settings=ASKED, network=network)
        p.use(A)
        p.use(B)
        source = await p.export(A)
        assert source is not None
        assert len(source.slots) == 3, "a quarter of the slots stays for others"
        request = asyncio.ensure_future(d.request(A, source=source))
        await asyncio.sleep(0.02)  # nothing has been read yet
        assert await p.export(B, "another") is not None
        assert await request == 1, "only the first page was still there"
        assert d.tiers.snapshot().pull_corrupt == 1
        await close(p, d)

    run(main())


def test_a_dead_peer_and_one_that_does_not_answer() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        p, d = pair(network)
        p.use(A)
        source = await p.export(A)
        assert source is not None
        began = asyncio.get_running_loop().time()
        network.silent.add(source.address)
        assert await d.request(A, source=source) == 0
        waited = asyncio.get_running_loop().time() - began
        assert waited <= ASKED.fetch_base_s + 16 / 1000 * ASKED.fetch_per_kilotoken_s + 1e-6
        network.gone.add(source.address)
        began = asyncio.get_running_loop().time()
        assert await d.request(tokens_of(1, 2, 3, 77), source=source) == 3  # it had computed these meanwhile
        assert await d.request(B, source=source) == 0
        assert asyncio.get_running_loop().time() - began < 0.01
        assert d.tiers.snapshot().pull_failures == 3
        await close(p, d)

    run(main())


def test_a_source_of_other_pages_is_not_used() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.use(A)
        source = await p.export(A)
        assert source is not None
        wrong = KvSource(**{**{f: getattr(source, f) for f in source.__struct_fields__}, "page_bytes": 8})
        assert await d.look_up(A, source=wrong) is None
        assert await d.request(B, source=source) == 0, "checksums name the block"
        without = TieredRequests(16, 16)
        assert await without.look_up(A, source=source) is None
        assert without.tiers.snapshot().pull_failures == 1
        assert await without.export(A) is None
        await close(p, d, without)

    run(main())


def test_leases_end_when_their_time_is_over() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.use(A)
        woken: list[float] = []
        p.tiers.wake = lambda: woken.append(asyncio.get_running_loop().time())
        assert await p.export(A, "one", lease_s=10.0) is not None
        assert await p.export(A, "two", lease_s=20.0) is not None
        await asyncio.sleep(11.0)
        assert p.tiers.leases == 1
        assert len(woken) == 1, "whoever waits for it hears of it"
        await asyncio.sleep(10.0)
        counts = p.tiers.snapshot()
        assert (counts.leases, counts.leases_expired, counts.leases_revoked) == (0, 2, 0)
        await close(p, d)

    run(main())


def test_a_new_export_pushes_out_the_oldest_lease() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork(), slots=8)
        for prompt in (A, B, tokens_of(9, 10)):
            p.use(prompt)
        first = await p.export(A, "first")
        second = await p.export(tokens_of(9, 10), "second")
        assert first is not None
        assert second is not None
        assert p.tiers.leases == 2
        third = await p.export(B, "third")
        assert third is not None
        assert len(third.slots) == 4
        counts = p.tiers.snapshot()
        assert (counts.leases, counts.leases_revoked) == (2, 1)
        assert await d.request(A, source=first) == 2, "the rest was overwritten"
        assert await d.request(B, source=third) == 4
        assert await d.request(tokens_of(9, 10), source=second) == 2
        await close(p, d)

    run(main())


def test_clearing_the_cache_ends_leases() -> None:
    async def main() -> None:
        p, d = pair(MemoryNetwork())
        p.use(A)
        assert await p.export(A) is not None
        assert await p.tiers.clear(store=False)
        assert p.tiers.leases == 0
        await close(p, d)

    run(main())


def test_a_full_d_pulls_nothing_and_p_goes_on() -> None:
    """D's L2 is leased to others, its L1 held by requests: a pull finds no slot, and P neither waits nor keeps
    anything."""

    async def main() -> None:
        network = MemoryNetwork()
        p, d = pair(network, slots=8, blocks=8)
        held = d.kv.open()
        assert d.kv.grow(held, 8 * BLOCK_TOKENS) is not None
        for number in range(20):
            prompt = tokens_of(100 + number, 200 + number, 300 + number)
            assert p.use(prompt) == 0
            source = await p.export(prompt, f"lease {number}")
            assert source is not None
            assert d.use(prompt) is None, "there is no room in L1"
            await d.look_up(prompt, source=source)
            assert d.use(prompt) is None
        assert p.tiers.leases <= 2
        d.kv.close(held)
        assert await d.request(prompt, source=source) == 3
        await close(p, d)

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(6, 16),
    slots=st.integers(2, 16),
    write=st.sampled_from(["through", "back", "asked"]),
)
def test_two_full_instances_serve_each_other(seed: int, blocks: int, slots: int, write: str) -> None:
    """Both prefill for each other, with L1 and L2 smaller than what is in flight, copies and reads of random speed,
    leases that are not released, pages that are damaged and peers that vanish: every request ends, and `use` checks
    every page that it takes."""
    rng = random.Random(seed)
    network = MemoryNetwork(lambda: rng.choice([0.0, 0.01, 0.2]))
    leases = count()

    def damage(page: bytearray) -> None:
        if rng.random() < 0.05:
            page[rng.randrange(len(page))] ^= 1 << rng.randrange(8)

    network.damage = damage

    async def client(p: TieredRequests, d: TieredRequests) -> None:
        for _ in range(6):
            await asyncio.sleep(rng.random() * 0.05)
            prompt = tokens_of(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
            await p.request(prompt)
            source = await p.export(prompt, f"lease {next(leases)}", lease_s=rng.choice([0.1, 60.0]))
            if source is not None and rng.random() < 0.1:
                network.gone.symmetric_difference_update({source.address})
            await d.request(prompt, source=source)
            if source is not None and rng.random() < 0.5:
                p.tiers.release([source.lease])
            p.check()
            d.check()

    async def main() -> None:
        options = TierSettings(write=write, predict=rng.random() < 0.5, staging=write == "asked")  # type: ignore[arg-type]
        one, two = (
            TieredRequests(
                blocks, slots, settings=options, network=network, delay=lambda: rng.choice([0.0, 0.001, 0.01])
            )
            for _ in range(2)
        )
        pairs = [(one, two), (two, one), (one, two), (two, one), (one, one)]
        await asyncio.wait_for(asyncio.gather(*(client(p, d) for p, d in pairs)), 600.0)
        await close(one, two)
        assert not one.tiers.lending
        assert not two.tiers.lending

    run(main())


def test_one_that_stops_waiting_does_not_cancel_what_others_wait_for() -> None:
    """Three requests want the same blocks; the client of the second leaves while they are copied into L1."""

    async def main() -> None:
        network = MemoryNetwork()
        p, other = pair(network)
        patient = TierSettings(staging=True, write="asked", predict=False, fetch_base_s=10.0)
        d = TieredRequests(16, 16, settings=patient, delay=lambda: 0.1, network=network)
        p.use(A)
        source = await p.export(A)
        brought: dict[int, int] = {}

        def look_up(index: int) -> asyncio.Task[None]:
            task = d.tiers.look_up(A, "", "", lambda result: brought.setdefault(index, result.peer), source)
            assert task is not None
            return task

        tasks = [look_up(index) for index in range(3)]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False]
        assert d.use(A) == 4
        await close(p, d, other)

    run(main())


def test_what_comes_while_a_pull_runs_is_not_read_again() -> None:
    """An export that ends early: the store has the rest, and two lookups want it at once."""

    async def main() -> None:
        pages: dict[bytes, bytes] = {}
        network = MemoryNetwork(lambda: 0.05)
        prompt = tokens_of(*range(1, 9))
        patient = TierSettings(predict=False, fetch_base_s=10.0)
        p = TieredRequests(40, 40, DictStore(pages), patient, network=network)
        d = TieredRequests(40, 40, DictStore(pages, lambda: 0.2), patient, network=network)
        p.use(prompt)
        await p.settle()
        whole = await p.export(prompt)
        assert whole is not None
        half = msgspec.structs.replace(whole, slots=whole.slots[:4], checksums=whole.checksums[:4])
        await asyncio.gather(d.look_up(prompt, source=half), d.look_up(prompt, source=half))
        d.check()
        assert d.use(prompt) == 8
        await close(p, d)

    run(main())
