"""Hit rates of the eviction policies on recorded traces, for caches of several sizes.

    python benchmarks/eviction.py                      all traces, a few minutes on one core
    python benchmarks/eviction.py --requests 500       the first requests of each, nothing kept
    python benchmarks/eviction.py --json               the figures on standard output, tables on standard error

Each trace goes through a KVManager in order of arrival: a request takes what is cached, gets blocks for the rest of its
prompt, commits and ends before the next one comes. Outputs take no room. Sizes are in blocks of 512 tokens, as in the
traces; the cache may have smaller ones (--block-size), which makes little difference and takes longer.

    hit rate   prompt tokens found in the cache / prompt tokens
    saved      the same, weighted by what a token costs to compute: 1 + its position / ATTENTION_SPAN

Sessions of the agentic trace, which has a clock for each, start one after another at random, SESSION_GAP_S apart on
average, and then keep to their recorded times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kllm.cache.eviction import ATTENTION_SPAN, EvictionName
from kllm.cache.manager import KVManager
from kllm.workload.trace_readers import BLOCK_TOKENS
from kllm.workload.traces import TRACE_DIR, TraceError, TraceName, TraceRow, read_trace

TRACES: tuple[TraceName, ...] = ("mooncake-conversation", "mooncake-synthetic", "weka-agentic")
POLICIES: tuple[EvictionName, ...] = get_args(EvictionName)
SIZES = (5_000, 10_000, 30_000, 50_000)  # blocks
SESSION_GAP_S = 10.0
RESULTS = Path(__file__).parent / "results" / "eviction.json"
console = Console(stderr=True)


@dataclass(frozen=True)
class Prompt:
    """tokens: of the whole blocks, one byte each, made from their ids. length: with what follows them."""

    blocks: tuple[int, ...]
    length: int

    def tokens(self) -> array[int]:
        return array("B", b"".join(block.to_bytes(8, "little") * (BLOCK_TOKENS // 8) for block in self.blocks))


def prompts(rows: Iterable[TraceRow]) -> list[Prompt]:
    """In order of arrival."""
    return [
        Prompt(tuple(islice(row.block_ids(), row.input_len // BLOCK_TOKENS)), row.input_len)
        for _, row in sorted(arrivals(rows), key=lambda arrival: arrival[0])
    ]


def arrivals(rows: Iterable[TraceRow]) -> Iterable[tuple[float, TraceRow]]:
    rng = random.Random(0)
    now = 0.0
    starts: dict[str, float] = {}
    for row in rows:
        if row.session is None:
            yield row.arrival_s, row
            continue
        if row.session not in starts and row.parent is not None:  # a sub-agent's clock is its parent's
            starts[row.session] = starts[row.parent]
        elif row.session not in starts:
            starts[row.session] = now = now + rng.expovariate(1 / SESSION_GAP_S)
        yield starts[row.session] + row.arrival_s, row


def work(tokens: int) -> float:
    """Cost of computing so many tokens from the start of a prompt."""
    return tokens + tokens * tokens / (2 * ATTENTION_SPAN)


def replay(requests: list[Prompt], num_blocks: int, policy: EvictionName, block_size: int) -> dict[str, float]:
    """num_blocks: room, in blocks of the trace. block_size: tokens of a block in the cache."""
    kv = KVManager(num_blocks * BLOCK_TOKENS // block_size, block_size, eviction=policy)
    hits = saved = seconds = 0.0
    for request in requests:
        tokens = request.tokens()
        start = time.process_time()
        holding = kv.open()
        found = kv.match(holding, tokens, len(tokens))
        kv.note_use(holding)
        if kv.grow(holding, len(tokens)) is None:
            raise ValueError(f"a prompt of {request.length} tokens does not fit into {num_blocks} blocks")
        kv.commit(holding, tokens, len(tokens), None)
        kv.close(holding)
        seconds += time.process_time() - start
        hits += found
        saved += work(found)
    kv.check()
    return {
        "hit_rate": hits / sum(request.length for request in requests),
        "saved": saved / sum(work(request.length) for request in requests),
        "us_per_request": seconds / len(requests) * 1e6,
    }


def measure(trace: TraceName, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Bound and figures of one trace."""
    requests = prompts(read_trace(trace, folder=arguments.folder, limit_requests=arguments.requests))
    distinct = len({block for request in requests for block in request.blocks})
    largest = max(len(request.blocks) for request in requests)
    task = progress.add_task(trace, total=1 + len(arguments.sizes) * len(POLICIES))
    bound = replay(requests, max(2, distinct), "lru", arguments.block_size)
    progress.advance(task)
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for size in arguments.sizes:
        if size < largest:
            raise ValueError(f"{trace} has a prompt of {largest} blocks, which does not fit into {size}")
        sizes[str(size)] = {}
        for policy in POLICIES:
            sizes[str(size)][policy] = replay(requests, size, policy, arguments.block_size)
            progress.advance(task)
    return {"requests": len(requests), "blocks": distinct, "infinite": bound, "sizes": sizes}


def show(trace: str, figures: dict[str, Any], out: Console) -> None:
    bound = figures["infinite"]
    title = (
        f"{trace}: {figures['requests']:,} requests, {figures['blocks']:,} different blocks. "
        f"Infinite cache: {bound['hit_rate']:.1%} of tokens, {bound['saved']:.1%} of work"
    )
    table = Table("blocks", title=title, title_justify="left")
    for figure in ("hit rate", "saved", "µs a request"):
        for policy in POLICIES:
            table.add_column(f"{figure}, {policy}", justify="right")
    for size, policies in figures["sizes"].items():
        cells = [f"{policies[policy][figure]:.1%}" for figure in ("hit_rate", "saved") for policy in POLICIES]
        times = [f"{policies[policy]['us_per_request']:.0f}" for policy in POLICIES]
        table.add_row(f"{int(size):,}", *cells, *times)
    out.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=TRACE_DIR, help="where the traces lie")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BLOCKS")
    parser.add_argument("--block-size", type=int, default=BLOCK_TOKENS, help="tokens of a block in the cache")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of each trace; nothing is kept")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    if arguments.requests is not None and arguments.requests < 1:
        parser.error("--requests must be at least 1")
    if arguments.block_size < 8 or BLOCK_TOKENS % arguments.block_size:
        parser.error(f"--block-size must divide {BLOCK_TOKENS} and be at least 8")
    return arguments


def main() -> None:
    arguments = parse()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            traces = {trace: measure(trace, arguments, progress) for trace in arguments.traces}
    except (TraceError, ValueError) as error:
        sys.exit(str(error))
    result = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "block_tokens": arguments.block_size,
        "attention_span": ATTENTION_SPAN,
        "session_gap_s": SESSION_GAP_S,
        "traces": traces,
    }
    if arguments.requests is None:
        arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    for trace, figures in traces.items():
        show(trace, figures, console if arguments.json else Console())
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
