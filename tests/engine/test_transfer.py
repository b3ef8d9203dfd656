"""Prefilled by one real engine, continued by another: the output is that of a single engine, whatever came across."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engines import make_engine
from support.handover import InstanceEnd, greedy_request
from support.tiny_models import write_tiny_llama

from kllm.cache.stores.mooncake_client import load_library
from kllm.cache.stores.store import StoreError
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.config import EngineConfig
from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.engine.lower_tiers import open_tiers
from kllm.messages import Down, Drain, Drained, Hello, KvSource, Release, Submit, Up
from kllm.request import Request
from kllm.transport.link import Link
from kllm.transport.memory import memory_pair

BLOCK = 8
OUTPUT = 12
COMMON: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "dtype": "float32",
    "kernels": "invariant",
    "fetch": "always",
    "fetch_base_s": 20.0,
    "transfer_memory": "1MiB",
    "kv_transfer": "shm",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    return folder


def prompts(seed: int, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    start = [rng.randrange(5, 250) for _ in range(40)]
    made = [[rng.randrange(5, 250) for _ in range(rng.randrange(1, 110))] for _ in range(count - 2)]
    return [*made, [7, 8, 9], [*start, 1, 2, 3]]


class Running(InstanceEnd):
    """An instance with a real engine."""

    def __init__(self, link: Link[Up, Down], tiers: TieredCache) -> None:
        super().__init__(link)
        self.tiers = tiers


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[Running]:
    config = EngineConfig(model=str(model), **{**COMMON, "num_kv_blocks": 60, **options})
    engine = make_engine(model, **{**COMMON, "num_kv_blocks": 60, **options})
    workers = ThreadWorkers()
    tiers = await open_tiers(config, engine.core, engine.kv_cache, engine.kv_spec, workers, None)
    assert tiers is not None
    near, far = memory_pair()
    hello = Hello(instance_id="i", incarnation="1")
    main = asyncio.ensure_future(instance_main(far, engine.core, None, workers, hello))
    try:
        yield Running(near, tiers)
        near.send(Drain())
        while not isinstance(await near.recv(), Drained):
            pass
        await main
        engine.core.scheduler.check()
        tiers.check()
    finally:
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
        engine.core.close()


def request(number: int, prompt: list[int]) -> Request:
    return greedy_request(number, prompt, OUTPUT)


def alone(model: Path, wanted: list[list[int]]) -> list[list[int]]:
    """What a single engine makes of them."""

    async def main() -> list[list[int]]:
        async with running(model, enable_prefix_caching=True) as one:
            return [(await one.submit(Submit(request=request(i, prompt)))).tokens for i, prompt in enumerate(wanted)]

    return asyncio.run(main())


async def across(
    p: Running, d: Running, number: int, prompt: list[int], spoil: Callable[[KvSource], KvSource] = lambda kv: kv
) -> tuple[list[int], int]:
    """Tokens by way of both, and how many tokens D found in its caches."""
    wanted = request(number, prompt)
    first = await p.submit(Submit(request=wanted, prefill_only=True))
    assert len(first.tokens) == 1
    kv = spoil(first.kv) if first.kv is not None else None
    rest = await d.submit(Submit(request=wanted, attempt=1, outputs=first.tokens, kv=kv))
    if kv is not None:
        p.link.send(Release(leases=[kv.lease]))
    return first.tokens + rest.tokens, rest.cached


def mooncake_missing() -> str:
    try:
        load_library("mooncake.engine")
    except StoreError as error:
        return str(error)
    return ""


WITH_MOONCAKE = pytest.mark.skipif(bool(mooncake_missing()), reason=mooncake_missing())


@pytest.mark.parametrize("kind", ["shm", pytest.param("mooncake", marks=WITH_MOONCAKE)])
def test_the_output_is_that_of_one_engine(kind: str, model: Path) -> None:
    wanted = prompts(1)
    expected = alone(model, wanted)

    async def main() -> None:
        async with running(model, kv_transfer=kind) as p, running(model, kv_transfer=kind) as d:
            for number, prompt in enumerate(wanted):
                tokens, cached = await across(p, d, number, prompt)
                assert tokens == expected[number]
                assert cached == len(prompt) // BLOCK * BLOCK, "all whole blocks came across"
            counts = d.tiers.snapshot()
            assert counts.pulled == sum(len(prompt) // BLOCK for prompt in wanted)
            assert counts.pull_failures == 0
            await p.submit(Submit(request=request(99, [1, 2])))  # comes after the last Release
            assert p.tiers.leases == 0

    asyncio.run(main())


def test_only_what_d_lacks_is_read(model: Path) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(5, 250) for _ in range(8 * BLOCK + 3)]
    expected = alone(model, [prompt])[0]

    async def main() -> None:
        async with running(model) as p, running(model) as d:
            await d.submit(Submit(request=request(0, prompt[: 4 * BLOCK + 1])))
            tokens, cached = await across(p, d, 1, prompt)
            assert tokens == expected
            assert cached == 8 * BLOCK
            counts = d.tiers.snapshot()
            assert counts.bytes_pulled == 4 * d.tiers.page_bytes

    asyncio.run(main())


def _corrupt(kv: KvSource) -> KvSource:
    """The third page is not what it should be."""
    return msgspec.structs.replace(kv, checksums=[*kv.checksums[:2], kv.checksums[2] ^ 1, *kv.checksums[3:]])


def _dead(kv: KvSource) -> KvSource:
    return msgspec.structs.replace(kv, address=f"shm:1:3:{'0' * 32}")


def _of_another_size(kv: KvSource) -> KvSource:
    return msgspec.structs.replace(kv, page_bytes=kv.page_bytes * 2)


@pytest.mark.parametrize(("spoil", "blocks"), [(_corrupt, 2), (_dead, 0), (_of_another_size, 0)])
def test_what_does_not_come_whole_is_computed(spoil: Callable[[KvSource], KvSource], blocks: int, model: Path) -> None:
    prompt = list(range(10, 10 + 6 * BLOCK + 1))
    expected = alone(model, [prompt])[0]

    async def main() -> None:
        async with running(model) as p, running(model) as d:
            tokens, cached = await across(p, d, 0, prompt, spoil)
            assert tokens == expected
            assert cached == blocks * BLOCK
            assert d.tiers.snapshot().pull_failures == 1

    asyncio.run(main())


def test_a_lease_that_is_over(model: Path) -> None:
    """P has given the slots to others before D reads them."""
    rng = random.Random(5)
    wanted = [[rng.randrange(5, 250) for _ in range(5 * BLOCK + 1)] for _ in range(5)]
    expected = alone(model, wanted[:1])

    async def main() -> None:
        async with running(model) as d, running(model, l2_memory=12 * d.tiers.page_bytes) as p:
            first = await p.submit(Submit(request=request(0, wanted[0]), prefill_only=True))
            assert first.kv is not None
            p.tiers.release([first.kv.lease])
            for number, prompt in enumerate(wanted[1:], 1):  # overwrites whatever the lease held
                other = await p.submit(Submit(request=request(number, prompt), prefill_only=True))
                p.link.send(Release(leases=[other.kv.lease] if other.kv is not None else []))
            submit = Submit(request=request(0, wanted[0]), attempt=1, outputs=first.tokens, kv=first.kv)
            rest = await d.submit(submit)
            assert first.tokens + rest.tokens == expected[0]
            assert rest.cached == 0
            assert d.tiers.snapshot().pull_corrupt == 1

    asyncio.run(main())
