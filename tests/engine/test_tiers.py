"""A real engine with lower tiers: whatever was evicted, brought back, lost or damaged, the output is the same."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.tiny_models import write_tiny_llama

from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.config import EngineConfig
from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.engine.loading import Engine
from kllm.engine.lower_tiers import open_tiers
from kllm.engine.page_mover import TensorPageMover
from kllm.messages import Deltas, Drain, Drained, Hello, Submit
from kllm.request import Request, SamplingParams
from kllm.transport.memory import memory_pair

BLOCK = 8
OUTPUT = 12
COMMON: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 48, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    return folder


def prompts(seed: int, count: int = 24) -> list[list[int]]:
    """Prompts that share beginnings with each other."""
    rng = random.Random(seed)
    starts = [[rng.randrange(5, 250) for _ in range(80)] for _ in range(4)]
    made = []
    for _ in range(count):
        start = rng.choice(starts)[: rng.randrange(8, 80)]
        made.append(start + [rng.randrange(5, 250) for _ in range(rng.randrange(1, 24))])
    return made


class Incarnation:
    """One life of an instance with tiers, driven over a link."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.engine: Engine = make_engine(model, **COMMON, **options)
        self.config = EngineConfig(model=str(model), **COMMON, **options)
        self.cached = 0  # prompt tokens found in a cache

    async def run(self, batches: list[list[list[int]]]) -> list[list[int]]:
        """The outputs of all prompts; a batch begins when the one before has ended."""
        engine = self.engine
        workers = ThreadWorkers()
        self.tiers: TieredCache | None = await open_tiers(
            self.config, engine.core, engine.kv_cache, engine.kv_spec, workers, None
        )
        near, far = memory_pair()
        main = asyncio.ensure_future(
            instance_main(far, engine.core, None, workers, Hello(instance_id="i", incarnation="1"))
        )
        outputs: dict[str, list[int]] = {}
        number = 0
        for batch in batches:
            left = len(batch)
            for prompt in batch:
                params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
                near.send(Submit(request=Request(request_id=str(number), prompt_token_ids=prompt, params=params)))
                outputs[str(number)] = []
                number += 1
            while left:
                message = await near.recv()
                for delta in message.items if isinstance(message, Deltas) else ():
                    assert delta.finish_reason != "error", delta.error
                    outputs[delta.request_id] += delta.token_ids
                    if delta.finish_reason is not None:
                        left -= 1
                        self.cached += delta.num_cached_tokens
        near.send(Drain())
        while not isinstance(await near.recv(), Drained):
            pass
        await main
        engine.core.scheduler.check()
        if self.tiers is not None:
            self.tiers.check()
        engine.core.close()
        return list(outputs.values())


def plain_outputs(model: Path, wanted: list[list[list[int]]]) -> list[list[int]]:
    return asyncio.run(Incarnation(model, enable_prefix_caching=False, num_kv_blocks=200).run(wanted))


TIERS: dict[str, dict[str, Any]] = {
    "l2": {"l2_memory": "8MiB"},
    "small l2": {"l2_memory": "320KiB"},
    "back": {"l2_memory": "8MiB", "l2_write": "back"},
    "selective": {"l2_memory": "8MiB", "l2_write": "selective"},
    "l3": {"l3": "store", "l3_capacity": "64MiB"},
    "l2 and l3": {"l2_memory": "200KiB", "l3": "store", "l3_capacity": "64MiB"},
}


@pytest.mark.parametrize("name", TIERS)
def test_output_is_that_without_a_cache(name: str, model: Path, tmp_path: Path) -> None:
    """An L1 that holds two or three prompts, requests four at a time, and a restart."""
    options = dict(TIERS[name])
    if "l3" in options:
        options["l3"] = str(tmp_path / "store")
    batches = 2 * [prompts(1)[i : i + 6] for i in range(0, 24, 6)]
    wanted = plain_outputs(model, batches)
    first = Incarnation(model, num_kv_blocks=20, fetch="always", **options)
    assert asyncio.run(first.run(batches)) == wanted
    second = Incarnation(model, num_kv_blocks=20, fetch="always", **options)
    assert asyncio.run(second.run(batches)) == wanted
    counts = second.tiers.snapshot() if second.tiers is not None else None
    assert counts is not None
    if "l3" in options:
        assert counts.fetched > 0
        assert second.cached > first.cached
    else:
        assert counts.loaded > 0


def test_damaged_pages_are_computed_again(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"l3": str(tmp_path / "store"), "l3_capacity": "64MiB", "fetch": "always"}
    batches = [prompts(2)]
    wanted = plain_outputs(model, batches)
    assert asyncio.run(Incarnation(model, num_kv_blocks=200, **options).run(batches)) == wanted
    segments = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 50_000]
    rng = random.Random(0)
    for path in segments:
        if path.suffix in (".mdb", ".lock"):
            continue
        data = bytearray(path.read_bytes())
        for _ in range(20):
            data[rng.randrange(1000, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: len(data) * 3 // 4])
    second = Incarnation(model, num_kv_blocks=200, **options)
    assert asyncio.run(second.run(batches)) == wanted
    assert second.tiers is not None
    counts = second.tiers.snapshot()
    assert counts.corrupt > 0
    assert counts.fetched > 0


def test_no_tier_touches_bytes_on_the_step_thread(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, writing and syncing files, and copying pages, happen on other threads than the event loop's."""
    threads: dict[str, set[int]] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **kwargs)

        return call

    options: dict[str, Any] = {"l2_memory": "320KiB", "l3": str(tmp_path / "store"), "fetch": "always"}
    options |= {"num_kv_blocks": 20, "fetch_base_s": 30.0}  # it waits, however busy the disk is
    first, second = Incarnation(model, **options), Incarnation(model, **options)
    for name in ("preadv", "pwritev", "writev", "fdatasync"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    monkeypatch.setattr(TensorPageMover, "_copy", watched("copy", TensorPageMover._copy))
    for incarnation in (first, second):  # the second finds what the first has stored
        asyncio.run(incarnation.run([prompts(3)]))
    assert {"preadv", "fdatasync", "copy"} <= set(threads)
    assert not [name for name, idents in threads.items() if threading.get_ident() in idents]
