"""How fast pages of KV come from another process: `python benchmarks/kv_transfer.py [--json]`.

Reads 64 MiB, in batches as an instance does (16 MiB), through shared memory and through Mooncake's transfer engine over
loopback TCP, and computes their checksums; best of five."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

import numpy as np

from kllm.cache.tiers.checksum import page_checksums
from kllm.cache.transfer.opening import make_transfer

PAGE_BYTES = 1 << 20
PAGES = 64
BATCH = 16
REPEATS = 5
HOST = "127.0.0.1"


async def own(kind: str) -> None:
    """The other process: has pages until its input ends."""
    transfer = await make_transfer(kind, PAGES, PAGE_BYTES, HOST)  # type: ignore[arg-type]
    assert transfer is not None
    transfer.slots[:] = np.random.default_rng(0).integers(0, 256, transfer.slots.shape, np.uint8)
    print(transfer.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)


def measure(kind: str) -> dict[str, float]:
    """Milliseconds of one page; GB/s of all, and of their checksums."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__, "--own", kind], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        try:
            return asyncio.run(_read_all(kind, address))
        finally:
            owner.kill()


async def _read_all(kind: str, address: str) -> dict[str, float]:
    transfer = await make_transfer(kind, PAGES, PAGE_BYTES, HOST)  # type: ignore[arg-type]
    assert transfer is not None
    one, every, sums = [], [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        await transfer.read(address, [0], [0], 60.0)
        one.append(time.perf_counter() - began)
        began = time.perf_counter()
        for first in range(0, PAGES, BATCH):
            slots = range(first, first + BATCH)
            await transfer.read(address, slots, slots, 60.0)
        every.append(time.perf_counter() - began)
        began = time.perf_counter()
        page_checksums([b"name"] * PAGES, [memoryview(page) for page in transfer.slots])
        sums.append(time.perf_counter() - began)
    await transfer.close()
    total = PAGES * PAGE_BYTES / 1e9
    return {"page_ms": 1e3 * min(one), "gb_s": total / min(every), "checksum_gb_s": total / min(sums)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        asyncio.run(own(arguments.own))
        return
    results = {kind: measure(kind) for kind in ("shm", "mooncake")}
    if arguments.json:
        print(json.dumps(results))
        return
    for kind, figures in results.items():
        print(kind, *(f"{name} {value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
