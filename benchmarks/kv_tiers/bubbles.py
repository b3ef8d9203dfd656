"""What cache work costs the step loop: the time between steps in which the executor waits, over prompts of a million
tokens and on the real engine."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import MethodType
from typing import Any

from rich.progress import Progress

from benchmarks.kv_tiers.paced import BLOCK_TOKENS, SPEC, PacedInstance, paced
from kllm.cache.manager import Holding, KVManager
from kllm.cache.stores.disk import DiskStore
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.store_link import StoreLink
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.config import EngineConfig
from kllm.engine.executor import Executor, StepFuture
from kllm.engine.instance import ThreadWorkers
from kllm.engine.kv_cache import allocate
from kllm.engine.loading import load_engine
from kllm.engine.lower_tiers import share_interpreter
from kllm.engine.page_mover import TensorPageMover
from kllm.hub import resolve
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import Late, Plan, StepResult
from kllm.telemetry.statistics import distribution
from kllm.tokenization.tokenizer import load_tokenizer

TOKENS = 1_000_000
CHUNK = 2048
STEP_S = 0.02
ROOM = 80_000  # blocks of L1, L2 and L3 each: more than the prompt
QUARTERS = 4
MODEL, LONG, LONG_PROMPTS, REPEATS = "smollm2", 8000, 2, 2
REPORTED = {"rescanning_ms": 400, "incremental_ms": 30, "prefill_change": 0.4}  # of a GPU engine, on long inputs


def rescan(kv: KVManager) -> KVManager:
    """The same cache without incremental matching: every chunk walks the whole prefix again, as D3 describes it."""
    commit = kv.commit

    def rescanning(
        self: KVManager, holding: Holding, tokens: array[int], computed: int, fence: int | None
    ) -> list[tuple[int, int]]:
        cursor = holding.cursor
        if cursor is not None and computed // self.block_tokens > cursor.depth:
            held, depth = cursor, cursor.depth
            holding.cursor = self.tree.cursor(*held.key)
            self.tree.match(holding.cursor, self._keys(tokens, 0, depth))
            self.tree.release(held)
        return commit(holding, tokens, computed, fence)

    kv.commit = MethodType(rescanning, kv)  # type: ignore[method-assign]
    return kv


def plain(num_blocks: int) -> KVManager:
    """No cache at all."""
    return KVManager(num_blocks, BLOCK_TOKENS, False)


def incremental(num_blocks: int) -> KVManager:
    return KVManager(num_blocks, BLOCK_TOKENS, fingerprint=SPEC.fingerprint)


def prompt(seed: int, length: int = TOKENS) -> list[int]:
    return [(seed + i * i) % 30_011 for i in range(length)]


def summary(bubbles: list[tuple[int, float]]) -> dict[str, Any]:
    """Milliseconds; means of the quarters of the prompt show whether they grow with it."""
    waits = [1e3 * wait for _, wait in bubbles]
    end = max(start for start, _ in bubbles) + 1
    quarters = [
        [1e3 * wait for start, wait in bubbles if quarter * end <= QUARTERS * start < (quarter + 1) * end]
        for quarter in range(QUARTERS)
    ]
    spread = distribution(waits)
    assert spread is not None
    return {
        "mean_ms": round(statistics.fmean(waits), 3),
        "p50_ms": round(spread["p50"], 3),
        "p99_ms": round(spread["p99"], 3),
        "max_ms": round(max(waits), 3),
        "mean_ms_by_quarter": [round(statistics.fmean(quarter), 3) if quarter else None for quarter in quarters],
    }


class WatchedExecutor:
    """Executor port around another: notes how long it had nothing to do between two plans."""

    def __init__(self, executor: Executor) -> None:
        self.depth = executor.depth
        self.waits: list[float] = []
        self._executor = executor
        self._ended: float | None = None

    def submit(self, plan: Plan) -> StepFuture:
        if self._ended is not None:
            self.waits.append(time.perf_counter() - self._ended)
        future = self._executor.submit(plan)
        assert isinstance(future, Future)
        future.add_done_callback(self._note_end)
        return future

    def _note_end(self, _: Future[StepResult]) -> None:
        self._ended = time.perf_counter()

    def bind(self, plan_id: int, late: Late) -> None:
        self._executor.bind(plan_id, late)

    def close(self) -> None:
        self._executor.close()


def _real_engine(rescans: bool) -> tuple[float, float]:
    """(mean milliseconds between steps, seconds) of long prompts on the real engine, one after the other."""
    config = EngineConfig(model=MODEL, num_kv_blocks=4 * LONG // BLOCK_TOKENS)
    source = resolve(config.model)
    engine = load_engine(config, source, load_tokenizer(source))
    core = engine.core
    if rescans:
        rescan(core.scheduler.kv)
    core.executor = watched = WatchedExecutor(core.executor)
    began = 0.0
    for number in range(LONG_PROMPTS + 1):
        if number == 1:  # the first touches memory for the first time
            began = time.perf_counter()
            watched.waits.clear()
        tokens = [(number + i * i) % 30_011 + 300 for i in range(LONG)]
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        core.add(Submit(request=Request(request_id=str(number), prompt_token_ids=tokens, params=params)))
        while core.num_unfinished:
            core.step()
    seconds = time.perf_counter() - began
    core.close()
    return 1e3 * statistics.fmean(watched.waits), seconds


def real_engine(progress: Progress) -> dict[str, Any]:
    """The same long prompts with the incremental tree and with rescanning, in turns; medians."""
    task = progress.add_task("long prompts on the real engine", total=2 * REPEATS)
    seen: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(REPEATS):
        for rescans in seen:
            seen[rescans].append(_real_engine(rescans))
            progress.advance(task)
    progress.remove_task(task)
    figures: dict[str, Any] = {"model": MODEL, "prompts": LONG_PROMPTS, "tokens": LONG}
    for rescans, name in ((False, "incremental"), (True, "rescanning")):
        figures[name] = {
            "mean_ms": round(statistics.median(wait for wait, _ in seen[rescans]), 3),
            "prefill_s": round(statistics.median(seconds for _, seconds in seen[rescans]), 3),
        }
    return figures


def measure(progress: Progress) -> dict[str, Any]:
    """A prompt of a million tokens in each mode; long prompts on the real engine."""
    return between_steps(progress) | {"real_engine": real_engine(progress), "reported": REPORTED}


def between_steps(progress: Progress, tokens: int = TOKENS) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens": tokens, "chunk": CHUNK, "step_ms": 1e3 * STEP_S, "bytes_per_token": 256}
    kinds: list[tuple[str, Callable[[int], KVManager]]] = [
        ("no_cache", plain),
        ("l1", incremental),
        ("l1_rescanning", lambda num_blocks: rescan(incremental(num_blocks))),
    ]
    task = progress.add_task("1 M tokens between steps", total=len(kinds) + 2)
    for name, make_kv in kinds:
        figures[name] = asyncio.run(_alone(make_kv, tokens))
        progress.advance(task)
    figures |= asyncio.run(_all_tiers(tokens, lambda: progress.advance(task)))
    progress.remove_task(task)
    return figures


async def _alone(make_kv: Callable[[int], KVManager], tokens: int) -> dict[str, Any]:
    instance = paced(STEP_S, ROOM, CHUNK, make_kv)
    instance.start()
    seconds = await instance.run([prompt(1, tokens)])
    await instance.stop()
    return summary(instance.executor.bubbles) | {"prefill_s": round(seconds[0], 2)}


async def _all_tiers(tokens: int, on_part: Callable[[], None]) -> dict[str, Any]:
    """Written through all tiers as it is computed; then, with L1 cleared, brought back while another one computes."""
    share_interpreter()
    with tempfile.TemporaryDirectory(prefix="kllm-tiers-", dir=".") as folder:
        instance = paced(STEP_S, 2 * ROOM, CHUNK, incremental, looks_up=True)
        tiers = _put_tiers_below(instance, Path(folder))
        instance.start()
        seconds = await instance.run([prompt(1, tokens)])
        figures = {"all_tiers": summary(instance.executor.bubbles) | {"prefill_s": round(seconds[0], 2)}}
        on_part()
        await tiers._demotion.settled()
        instance.core.scheduler.kv.clear()
        instance.executor.forget()
        other, again = await instance.run([prompt(2, tokens), prompt(1, tokens)])
        counts = tiers.snapshot()
        figures["all_tiers_fetching"] = summary(instance.executor.bubbles) | {
            "ttft_s_of_the_fetched": round(again, 2),
            "ttft_s_beside": round(other, 2),
            "blocks_loaded": counts.loaded,
            "blocks_stored": counts.stored,
        }
        on_part()
        await instance.stop()
    return figures


def _put_tiers_below(instance: PacedInstance, folder: Path) -> TieredCache:
    kv = instance.core.scheduler.kv
    mover = TensorPageMover(allocate(SPEC, kv.pool.num_blocks), SPEC, ROOM)
    store = DiskStore(folder, mover.page_bytes, 4 * ROOM * mover.page_bytes)
    link = StoreLink(store, SPEC.fingerprint, time.monotonic)
    settings = TierSettings(predict=False, fetch_base_s=60.0)
    tiers = TieredCache(kv, ROOM, mover, link, settings, ThreadWorkers(), time.monotonic)
    instance.core.use_tiers(tiers)
    return tiers
