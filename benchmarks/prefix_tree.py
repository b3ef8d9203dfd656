"""Scheduler and prefix tree on one very long prompt, without a model (capability D3).

    python benchmarks/prefix_tree.py [--tokens 1000000] [--chunk 2048] [--plot FILE] [--json]

One prompt goes through Scheduler and KVManager in chunks; each result is made by hand. Timed per chunk: plan and
commit, with everything in them (making keys, matching, insertion, allocation). Beside it the same tree used without
a kept position: per chunk a new cursor at the root matches the whole prefix so far and inserts all of it.

The garbage collector runs as in production: it is on.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kllm.cache.manager import KVManager
from kllm.cache.prefix_tree import PrefixTree
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import RowResult, StepResult
from kllm.scheduling.scheduler import Scheduler

WINDOW = 16  # chunks in the medians that are compared
console = Console(stderr=True)


class GcClock:
    """Seconds that the garbage collector took while it was entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.longest = 0.0
        self._started = 0.0

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        pause = time.perf_counter() - self._started
        self.seconds += pause
        self.longest = max(self.longest, pause)

    @contextmanager
    def running(self) -> Iterator[None]:
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)


def time_chunks(tokens: list[int], chunk: int, block_tokens: int) -> list[float]:
    """Milliseconds of plan and commit for each chunk. The first one carries admission; the last one, which samples,
    ends the request and gives its path back."""
    kv = KVManager(-(-len(tokens) // block_tokens) + 1, block_tokens)
    scheduler = Scheduler(kv, max_model_len=len(tokens) + 2, max_num_seqs=4, max_tokens_per_step=chunk)
    params = SamplingParams(max_tokens=1, seed=0)
    scheduler.add(Submit(request=Request(request_id="long", prompt_token_ids=tokens, params=params)), 0.0)
    times = []
    for _ in track(range(-(-len(tokens) // chunk)), "kept position", console=console):
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        rows = {step.row: RowResult(token=1 if step.sample else None) for step in plan.steps}
        result = StepResult(plan.id, rows)
        made = time.perf_counter()
        scheduler.commit(result, 0.0)
        times.append((time.perf_counter() - made + planned - start) * 1e3)
    assert scheduler.num_unfinished == 0
    scheduler.check()
    return times


def time_rescans(tokens: list[int], chunk: int, block_tokens: int, most: int) -> list[tuple[int, float]]:
    """(chunk number, milliseconds) of the same work from the root, for `most` chunks spread evenly over the prompt
    (all when there are not more). Chunks between are inserted untimed from a kept cursor.

    Covers keys, match and insertion only: without the scheduler and without allocation, to its advantage."""
    tree = PrefixTree()
    kept = tree.cursor()
    known = array("i", tokens)
    width = block_tokens * known.itemsize
    count = -(-len(tokens) // chunk)
    every = max(1, -(-count // most))
    times = []
    for number in track(range(count), "rescan from the root", console=console):
        end = min(len(tokens), (number + 1) * chunk) // block_tokens
        if number % every == every // 2 or every == 1:
            start = time.perf_counter()
            raw = known[: end * block_tokens].tobytes()
            keys = [raw[i : i + width] for i in range(0, len(raw), width)]
            cursor = tree.cursor()
            tree.match(cursor, keys)
            tree.release(cursor)
            cursor = tree.cursor()
            tree.insert(cursor, keys, list(range(end)))
            times.append((number, (time.perf_counter() - start) * 1e3))
            tree.release(cursor)
        raw = known[kept.depth * block_tokens : end * block_tokens].tobytes()
        keys = [raw[i : i + width] for i in range(0, len(raw), width)]
        tree.insert(kept, keys, list(range(kept.depth, end)))
    return times


def summarise(times: list[float], rescans: list[tuple[int, float]], clock: GcClock) -> dict[str, float | int]:
    """The figures of one run. The first chunk (admission) is reported apart."""
    flat = times[1:]
    window = max(1, min(WINDOW, len(flat) // 2))
    first, last = statistics.median(flat[:window]), statistics.median(flat[-window:])
    same_chunks = sum(times[number] for number, _ in rescans if number > 0)
    return {
        "last_over_first": last / first,
        "ms_per_chunk": statistics.median(flat),
        "rescan_over_incremental": sum(ms for number, ms in rescans if number > 0) / same_chunks,
        "ms_max": max(flat),
        "ms_first": first,
        "ms_last": last,
        "admission_ms": times[0],
        "rescan_ms_last": statistics.median(ms for _, ms in rescans[-window:]),
        "chunks": len(times),
        "rescanned_chunks": len(rescans),
        "gc_ms": clock.seconds * 1e3,
        "gc_longest_ms": clock.longest * 1e3,
    }


def show(result: dict[str, float | int], tokens: int, chunk: int) -> None:
    table = Table("figure", "value", title=f"{tokens:,} tokens in chunks of {chunk:,}", title_justify="left")
    table.add_row("plan + commit per chunk, median", f"{result['ms_per_chunk']:.3f} ms")
    table.add_row(f"  first {WINDOW} / last {WINDOW}", f"{result['ms_first']:.3f} / {result['ms_last']:.3f} ms")
    table.add_row("  last over first", f"{result['last_over_first']:.2f}")
    table.add_row("  slowest", f"{result['ms_max']:.3f} ms")
    table.add_row("admission (first chunk)", f"{result['admission_ms']:.2f} ms")
    table.add_row("garbage collection, all / longest", f"{result['gc_ms']:.2f} / {result['gc_longest_ms']:.2f} ms")
    table.add_row(f"rescan per chunk, last {WINDOW}", f"{result['rescan_ms_last']:.2f} ms")
    table.add_row(
        "rescan over incremental",
        f"{result['rescan_over_incremental']:.0f} × (on {result['rescanned_chunks']} of {result['chunks']} chunks)",
    )
    Console().print(table)


def plot(path: str, times: list[float], rescans: list[tuple[int, float]], chunk: int) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'kllm[plot]'")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([n * chunk / 1e6 for n in range(1, len(times))], times[1:], label="kept position: plan + commit")
    axes.plot([n * chunk / 1e6 for n, _ in rescans], [ms for _, ms in rescans], label="rescan from the root")
    axes.set(xlabel="position in the prompt (million tokens)", ylabel="ms per chunk", yscale="log")
    axes.set_title(f"Scheduler and prefix tree, chunks of {chunk:,} tokens")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler and prefix tree time per chunk of one long prompt.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rescans", type=int, default=64, help="chunks timed from the root, spread over the prompt")
    parser.add_argument("--plot", metavar="FILE", help="write a plot of ms per chunk (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    args = parser.parse_args()
    if args.chunk < args.block_size or args.tokens < 3 * args.chunk or args.block_size < 1 or args.rescans < 1:
        parser.error("--tokens must be at least three chunks, and --chunk at least one block")
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(args.tokens)]
    clock = GcClock()
    with clock.running():
        times = time_chunks(tokens, args.chunk, args.block_size)
    rescans = time_rescans(tokens, args.chunk, args.block_size, args.rescans)
    result = summarise(times, rescans, clock)
    show(result, args.tokens, args.chunk)
    if args.plot:
        plot(args.plot, times, rescans, args.chunk)
    if args.json:
        print(json.dumps({"tokens": args.tokens, "chunk": args.chunk, "block_size": args.block_size, **result}))


if __name__ == "__main__":
    main()
