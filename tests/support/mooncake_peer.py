"""python mooncake_peer.py MASTER SEGMENT_BYTES: a MooncakeStore in a process of its own, told what to do on stdin.

Each line is a request in JSON, ["put", numbers] or ["get", numbers], and is answered with one: how many pages were
written, or which are there. The end of stdin closes the store.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kllm.cache.stores.mooncake import MooncakeStore

PAGE = 64 << 10


def key(number: int) -> bytes:
    return b"page %d" % number


def page(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE)


async def put(store: MooncakeStore, numbers: Sequence[int]) -> int:
    return await store.put([key(number) for number in numbers], [memoryview(page(number)) for number in numbers])


async def get(store: MooncakeStore, numbers: Sequence[int]) -> list[int]:
    """Which are there; those must be what was put."""
    memory = [bytearray(PAGE) for _ in numbers]
    there = await store.get([key(number) for number in numbers], [memoryview(one) for one in memory])
    for number, found, content in zip(numbers, there, memory, strict=True):
        assert not found or content == page(number), f"page {number} is not what was put"
    return [number for number, found in zip(numbers, there, strict=True) if found]


class Peer:
    """The process, as tests see it."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, master, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._answer()

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> str:
        """What it wrote to stderr."""
        _, errors = self.process.communicate()
        return errors

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()


async def main(master: str, segment_bytes: int) -> None:
    store = await MooncakeStore.connect(master, PAGE, segment_bytes=segment_bytes)
    print(json.dumps("ready"), flush=True)
    for line in iter(sys.stdin.readline, ""):
        what, numbers = json.loads(line)
        print(json.dumps(await {"put": put, "get": get}[what](store, numbers)), flush=True)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
