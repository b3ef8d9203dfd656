"""How fast pages go into Mooncake and come back, over TCP on loopback, beside a plain copy of the same pages.

    python benchmarks/mooncake_throughput.py [--mebibytes 512] [--page 368640] [--runs 5] [--json]

Three processes: mooncake_master, a holder that lends its memory, and this one, which lends none, so that each page
crosses a socket. Batches of 4 MiB with their checksums made and verified, one at a time and four at a time; the copy is
memcpy on one thread. All are repeated in turn, and medians are printed: MB/s, and milliseconds for a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kllm.cache.stores.mooncake import MooncakeStore

BATCH_BYTES = 4 << 20
ROOM = 2  # segment bytes for each byte of pages: the master begins to evict at 90 %
console = Console(stderr=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def hold(master: str, page_bytes: int, segment_bytes: int) -> None:
    store = await MooncakeStore.connect(master, page_bytes, segment_bytes=segment_bytes)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await store.close()


@contextmanager
def cluster(page_bytes: int, segment_bytes: int) -> Iterator[str]:
    """The address of a master that a holder has joined."""
    port = free_port()
    flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--rpc_address=127.0.0.1", "--minloglevel=2"]
    master = subprocess.Popen([Path(sys.executable).with_name("mooncake_master"), *flags])
    address = f"127.0.0.1:{port}"
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if master.poll() is not None:
                    raise SystemExit("mooncake_master did not start") from None
                time.sleep(0.02)
        command = [sys.executable, __file__, "--hold", address, str(segment_bytes), "--page", str(page_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            yield address
    finally:
        master.kill()
        master.wait()


class Batches:
    """Random pages in batches, with room to read them into."""

    def __init__(self, total_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        count = max(1, BATCH_BYTES // page_bytes)
        self.count = max(4, total_bytes // (count * page_bytes))
        size = self.count * count * page_bytes
        self.source, self.target = mmap.mmap(-1, size), mmap.mmap(-1, size)
        for start in range(0, size, page_bytes):
            self.source[start : start + page_bytes] = os.urandom(page_bytes)
            self.target[start : start + page_bytes] = bytes(page_bytes)
        self.bytes = size
        self._pages = count

    def keys(self, batch: int) -> list[bytes]:
        return [b"%d" % (batch * self._pages + i) for i in range(self._pages)]

    def pages(self, memory: mmap.mmap, batch: int) -> list[memoryview]:
        view, size = memoryview(memory), self.page_bytes
        return [view[size * i : size * (i + 1)] for i in range(batch * self._pages, (batch + 1) * self._pages)]

    def copy(self) -> None:
        source, target = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (self.source, self.target))
        for start in range(0, self.bytes, self.page_bytes):
            ctypes.memmove(target + start, source + start, self.page_bytes)


async def timed(batches: Batches, at_once: int, call: Callable[[int], Awaitable[object]]) -> float:
    """Seconds for all batches."""
    numbers = iter(range(batches.count))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return time.perf_counter() - began


async def measure(store: MooncakeStore, batches: Batches, runs: int) -> dict[str, list[float]]:
    """Seconds by name, for each run."""

    async def put(number: int) -> None:
        written = await store.put(batches.keys(number), batches.pages(batches.source, number))
        assert written == len(batches.keys(number))

    async def get(number: int) -> None:
        assert all(await store.get(batches.keys(number), batches.pages(batches.target, number)))

    async def exists(number: int) -> None:
        assert await store.exists(batches.keys(number)) == len(batches.keys(number))

    seconds: dict[str, list[float]] = {}
    for _ in range(runs):
        began = time.perf_counter()
        batches.copy()
        seconds.setdefault("memcpy", []).append(time.perf_counter() - began)
        for at_once in (1, 4):
            await store.clear()
            for name, call in (("put", put), ("get", get), ("exists", exists)):
                seconds.setdefault(f"{name}_{at_once}", []).append(await timed(batches, at_once, call))
    assert batches.source[:] == batches.target[:]
    return seconds


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    batches = Batches(arguments.mebibytes << 20, arguments.page)
    with cluster(arguments.page, ROOM * batches.bytes + (16 << 20)) as address:
        store = await MooncakeStore.connect(address, arguments.page, segment_bytes=0)
        seconds = await measure(store, batches, arguments.runs)
        await store.close()
    results: dict[str, float] = {"page_bytes": arguments.page, "total_bytes": batches.bytes}
    for name, values in seconds.items():
        median = statistics.median(values)
        if not name.startswith("exists"):
            results[f"{name}_mb_s"] = round(batches.bytes / median / 1e6)
        results[f"{name}_batch_ms"] = round(1e3 * median / batches.count, 3)
    return results


def show(results: dict[str, float]) -> None:
    table = Table("", "at once", "MB/s", "of memcpy", "ms a batch")
    for name in ("memcpy", "put_1", "put_4", "get_1", "get_4", "exists_1", "exists_4"):
        what, _, at_once = name.partition("_")
        rate = results.get(f"{name}_mb_s")
        share = f"{rate / results['memcpy_mb_s']:.0%}" if rate else ""
        table.add_row(what, at_once or "1", f"{rate:,.0f}" if rate else "", share, f"{results[f'{name}_batch_ms']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512, help="of pages")
    parser.add_argument("--page", type=int, default=368_640, help="bytes of a page")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--hold", nargs=2, metavar=("MASTER", "BYTES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        asyncio.run(hold(arguments.hold[0], arguments.page, int(arguments.hold[1])))
        return
    results = asyncio.run(run(arguments))
    show(results)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
