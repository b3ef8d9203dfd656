"""Checksums of pages that another instance reads. XXH3-64, as in the stores; seeded with the block's name, so that it
says which KV a page must hold, and not only that it is whole."""

from __future__ import annotations

import time
from collections.abc import Sequence

import xxhash

POLITE_BYTES = 4 << 20  # in a row: some 0.2 ms


def page_checksum(block_hash: bytes, page: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(page, xxhash.xxh3_64_intdigest(block_hash))


def page_checksums(hashes: Sequence[bytes], pages: Sequence[memoryview]) -> list[int]:
    """For a thread beside the step loop: it offers the interpreter lock to others again and again."""
    sums, done = [], 0
    for block_hash, page in zip(hashes, pages, strict=True):
        sums.append(page_checksum(block_hash, page))
        done += len(page)
        if done >= POLITE_BYTES:
            done = 0
            time.sleep(0)
    return sums
