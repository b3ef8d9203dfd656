"""Throughput of the KV store on disk against sequential I/O on the same file system, in one run.

    python benchmarks/store_throughput.py [--megabytes 256] [--rounds 4] [--folder DIR] [--json]

In turns, round after round: a plain file is written in pieces of 4 MiB with an fdatasync after each, another with one
at the end; DiskStore.put gets the same bytes as pages of 368,640 bytes (16 tokens of smollm2 in bfloat16), 11 pages
(4 MiB) a call, with one call and with two calls under way. Then the page cache is told to forget the files, and they
are read: the plain file from front to back, the store by DiskStore.get of as many pages a call, checksums on. Both go
into the same memory. Data are random, so that nothing on the way can compress them.

Prints MB/s (10^6 bytes, medians over the rounds) and the store's share of plain I/O with an fdatasync per piece.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kllm.cache.stores.disk import DiskStore

PAGE_BYTES = 368_640
PAGES_PER_CALL = (4 << 20) // PAGE_BYTES
PIECE_BYTES = 4 << 20
TARGET = 0.6
Measured = dict[str, list[float]]


class Content:
    """The bytes that are written, and memory of the same size to read into, both cut into pages."""

    def __init__(self, calls: int) -> None:
        self.bytes = calls * PAGES_PER_CALL * PAGE_BYTES
        pattern = os.urandom(PAGES_PER_CALL * PAGE_BYTES)
        self.source = bytearray(pattern * calls)
        for start in range(0, self.bytes, PAGE_BYTES):  # no two pages are alike
            self.source[start : start + 8] = start.to_bytes(8, "little")
        self.target = bytearray(self.bytes)

    def calls(self, memory: bytearray) -> Iterator[list[memoryview]]:
        view = memoryview(memory)
        size = PAGES_PER_CALL * PAGE_BYTES
        for start in range(0, self.bytes, size):
            yield [view[at : at + PAGE_BYTES] for at in range(start, start + size, PAGE_BYTES)]


def write_plain(path: Path, content: Content, sync_each: bool) -> float:
    view = memoryview(content.source)
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    for start in range(0, content.bytes, PIECE_BYTES):
        done = os.pwrite(fd, view[start : start + PIECE_BYTES], start)
        assert done == min(PIECE_BYTES, content.bytes - start)
        if sync_each:
            os.fdatasync(fd)
    os.fdatasync(fd)
    os.close(fd)
    return time.perf_counter() - began


def read_plain(path: Path, content: Content) -> float:
    view = memoryview(content.target)
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, content.bytes, PIECE_BYTES):
        done = os.preadv(fd, [view[start : start + PIECE_BYTES]], start)
        assert done == min(PIECE_BYTES, content.bytes - start)
    os.close(fd)
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Out of the page cache with the files in it, which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".mdb":
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def keys_of(calls: int) -> list[list[bytes]]:
    numbers = iter(range(calls * PAGES_PER_CALL))
    return [
        [hashlib.blake2b(b"%d" % next(numbers), digest_size=16).digest() + bytes(9) for _ in range(PAGES_PER_CALL)]
        for _ in range(calls)
    ]


async def _in_turns(work: list[Callable[[], object]], at_once: int) -> float:
    """Seconds for all, `at_once` under way at a time."""
    waiting = iter(work)

    async def worker() -> None:
        for call in waiting:
            await call()  # type: ignore[misc]

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return time.perf_counter() - began


async def measure_store(folder: Path, content: Content, keys: list[list[bytes]], at_once: int) -> tuple[float, float]:
    """Seconds to put and to get everything."""
    store = DiskStore(folder, PAGE_BYTES, 4 * content.bytes + (1 << 30))
    puts = [lambda k=k, p=p: store.put(k, p) for k, p in zip(keys, content.calls(content.source), strict=True)]
    put_s = await _in_turns(puts, at_once)
    await store.close()
    forget(folder)
    store = DiskStore(folder, PAGE_BYTES, 4 * content.bytes + (1 << 30))
    gets = [lambda k=k, p=p: store.get(k, p) for k, p in zip(keys, content.calls(content.target), strict=True)]
    get_s = await _in_turns(gets, at_once)
    assert store.counts.bytes_read == content.bytes
    assert store.counts.corrupt == 0
    await store.close()
    assert content.target == content.source
    return put_s, get_s


def measure_round(place: Path, content: Content, keys: list[list[bytes]], seconds: Measured) -> None:
    plain = place / "plain"
    seconds["write, fdatasync at the end"].append(write_plain(plain, content, sync_each=False))
    plain.unlink()
    seconds["write, fdatasync each"].append(write_plain(plain, content, sync_each=True))
    forget(place)
    seconds["read"].append(read_plain(plain, content))
    plain.unlink()
    for at_once, suffix in ((1, ""), (2, ", two at once")):
        content.target[:] = bytes(content.bytes)
        put_s, get_s = asyncio.run(measure_store(place / "store", content, keys, at_once))
        seconds["put" + suffix].append(put_s)
        seconds["get" + suffix].append(get_s)
        shutil.rmtree(place / "store")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="10^6 bytes written and read by each (default 256)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: the one of TMPDIR)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.megabytes < 1 or arguments.rounds < 1:
        parser.error("--megabytes and --rounds must be at least 1")
    calls = max(1, round(arguments.megabytes * 1e6 / (PAGES_PER_CALL * PAGE_BYTES)))
    content, keys = Content(calls), keys_of(calls)
    names = ["write, fdatasync at the end", "write, fdatasync each", "read"]
    names += ["put", "get", "put, two at once", "get, two at once"]
    seconds: Measured = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place, Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(arguments.rounds), description="Rounds"):
            measure_round(Path(place), content, keys, seconds)
    report(seconds, content.bytes, arguments.json)


def report(seconds: Measured, size: int, as_json: bool) -> None:
    rates = {name: size / statistics.median(each) / 1e6 for name, each in seconds.items()}
    shares = {name: rates[name] / rates["write, fdatasync each"] for name in ("put", "put, two at once")}
    shares |= {name: rates[name] / rates["read"] for name in ("get", "get, two at once")}
    if as_json:
        print(json.dumps({"bytes": size, "mb_per_s": rates, "share_of_plain": shares, "target": TARGET}))
        return
    table = Table("", "MB/s", "of plain I/O", "rounds")
    for name, rate in rates.items():
        rounds = " ".join(f"{size / one / 1e6:.0f}" for one in seconds[name])
        table.add_row(name, f"{rate:,.0f}", f"{shares[name]:.2f}" if name in shares else "", rounds)
    Console().print(table)
    if min(shares.values()) < TARGET:
        print(f"below the target of {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
