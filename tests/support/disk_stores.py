"""Numbered pages for DiskStore, and the store driven from tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kllm.cache.stores.disk import DiskStore

PAGE = 4096
CAPACITY = 64 << 20
FINGERPRINT = bytes(range(8))
T = TypeVar("T")


def key(number: int, fingerprint: bytes = FINGERPRINT) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest() + b"\0" + fingerprint


def page(number: int, size: int = PAGE) -> bytes:
    return random.Random(number).randbytes(size)


class Pages:
    """A store whose pages are told apart by numbers. got() checks that what is there is what was put."""

    def __init__(self, folder: Path, capacity: int = CAPACITY, *, size: int = PAGE, **options: Any) -> None:
        self.size = size
        self._runner = asyncio.Runner()
        self.store = DiskStore(folder, size, capacity, **options)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def put(self, numbers: Iterable[int]) -> int:
        numbers = list(numbers)
        pages = [memoryview(page(number, self.size)) for number in numbers]
        return self.run(self.store.put([key(number) for number in numbers], pages))

    def exists(self, numbers: Iterable[int]) -> int:
        return self.run(self.store.exists([key(number) for number in numbers]))

    def got(self, numbers: Sequence[int]) -> list[int]:
        """Which of these are there."""
        memory = [bytearray(self.size) for _ in numbers]
        there = self.run(self.store.get([key(number) for number in numbers], [memoryview(one) for one in memory]))
        self.run(self.store.idle())
        for number, found, content in zip(numbers, there, memory, strict=True):
            assert not found or content == page(number, self.size), f"page {number} is not what was put"
        return [number for number, found in zip(numbers, there, strict=True) if found]

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@contextmanager
def open_pages(folder: Path, capacity: int = CAPACITY, **options: Any) -> Iterator[Pages]:
    pages = Pages(folder, capacity, **options)
    try:
        yield pages
    finally:
        pages.close()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def segment_bytes(folder: Path) -> int:
    total = 0
    for path in segments(folder):
        with suppress(FileNotFoundError):  # evicted by another process
            total += path.stat().st_size
    return total


def change_file(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip_bit(path: Path, offset: int) -> None:
    def flip(content: bytearray) -> None:
        content[offset] ^= 0x10

    change_file(path, flip)
