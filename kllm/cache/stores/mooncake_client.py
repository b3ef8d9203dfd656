"""MooncakeClient: Mooncake's library as a store of pages with checksums. It blocks; MooncakeStore calls it on threads.

An object of Mooncake is a page and then its checksum:

    kllm/<key in hex>  ->  page (page_bytes) | XXH3-64 of the page, seeded with the key (8 bytes)

The library reads and writes the caller's memory itself. Over TCP that memory need not be registered with it, and must
not be: whatever is registered, everybody who reaches the library's port may read and overwrite, without a password.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from kllm.cache.stores.store import StoreCounts, StoreError

logger = logging.getLogger(__name__)

PREFIX = "kllm/"
P2P_HANDSHAKE = "P2PHANDSHAKE"  # metadata: hosts ask each other, nothing besides mooncake_master is needed
CHECKSUM_BYTES = 8
LEAST_SEGMENT_BYTES = 16 << 20  # of the library
PAGES_AT_ONCE = 16  # in one call of the library, so that its time limits add up to little
INSTALL_PACKAGE = "pip install 'kllm[mooncake]'"
INSTALL_LIBRARIES = "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"

# The library takes these from the environment only; what the operator has set stays. Its own limits are 30 s for each
# answer and 20 attempts to start: with a master that is gone, one call would take minutes.
SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_LANES_PER_PEER": "16",  # connections to each host: pages that wait for a dead one wait at the same time
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
}

# Mooncake's error codes (ErrorCode in its types.h).
SEGMENT_NOT_FOUND, NO_AVAILABLE_HANDLE = -101, -200
INVALID_PARAMS = -600
TRANSFER_FAIL = -800
RPC_FAIL, RPC_TIMEOUT = -900, -901
# not ready, not found, lease expired while it was read, replica not found or gone
MISSES = frozenset({-703, -704, -707, -710, -712})


class MooncakeClient:
    """May be called by several threads at once, open() and close() excepted. master: HOST:PORT of mooncake_master.
    segment_bytes: memory of this host for pages of everybody, taken as it is used; 0: none; else at least
    LEAST_SEGMENT_BYTES. host: the address under which the others reach this one. Every method raises StoreError, and
    none takes longer than about 15 s.

    The library holds the GIL in open() (30 ms, seconds if the master hangs) and in close() (up to 2 s), where it waits
    for threads of its own; in all other calls it does not."""

    def __init__(self, master: str, page_bytes: int, segment_bytes: int, host: str, metadata: str) -> None:
        self.counts = StoreCounts()
        self._master = master
        self._page_bytes = page_bytes
        self._segment_bytes = segment_bytes
        self._host = host
        self._metadata = metadata
        self._counting = threading.Lock()
        self._library: Any = None

    def open(self) -> None:
        if 0 < self._segment_bytes < LEAST_SEGMENT_BYTES:
            raise StoreError(
                f"Mooncake takes segments of {LEAST_SEGMENT_BYTES:,} bytes or more, or 0, not {self._segment_bytes:,}"
            )
        library = _load()()
        # No buffer of the library's own: it is for calls that copy, which are not used here.
        code = library.setup(self._host, self._metadata, self._segment_bytes, 0, "tcp", "", self._master)
        if code != 0:
            raise StoreError(
                f"Mooncake (mooncake_master at {self._master}) could not be set up as {self._host} with "
                f"{self._segment_bytes:,} bytes: error {code}, its reason is on stderr"
            )
        self._library = library

    def close(self) -> None:
        """Gives the segment, and the pages in it, up. Idempotent."""
        library, self._library = self._library, None
        if library is not None and (code := library.close()) != 0:
            logger.warning("KV store: closing Mooncake ended with error %d", code)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there. The master keeps those for the length of a lease (10 s)."""
        codes: list[int] = self._library.batch_is_exist(_names(keys)) if keys else []
        self._check(codes)
        return next((i for i, code in enumerate(codes) if code != 1), len(codes))

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """At most PAGES_AT_ONCE. A host that does not answer is an error only if no page came from another."""
        sums = (ctypes.c_uint64 * len(keys))()
        codes = self._library.batch_get_into_multi_buffers(_names(keys), *self._parts(into, sums))
        lost = [code for code in codes if code < 0 and code not in MISSES and code != INVALID_PARAMS]
        if lost and (max(codes) < 0 or lost != [TRANSFER_FAIL] * len(lost)):
            raise self._error(next((code for code in lost if code != TRANSFER_FAIL), TRANSFER_FAIL))
        good, corrupt = [], 0
        for i, code in enumerate(codes):
            whole = code == self._page_bytes + CHECKSUM_BYTES
            good.append(whole and sums[i] == _checksum(keys[i], into[i]))
            corrupt += not good[i] and (code >= 0 or code == INVALID_PARAMS)  # invalid: it is longer than a page
        with self._counting:
            self.counts.bytes_read += sum(good) * self._page_bytes
            self.counts.corrupt += corrupt
        if corrupt:
            logger.warning("KV store: %d damaged pages in Mooncake, not used", corrupt)
        return good

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """At most PAGES_AT_ONCE. Returns how many were not there yet."""
        there = self._library.batch_is_exist(_names(keys))
        self._check(there)
        fresh = {key: page for key, page, code in zip(keys, pages, there, strict=True) if code != 1}
        if not fresh:
            return 0
        sums = (ctypes.c_uint64 * len(fresh))(*(_checksum(key, page) for key, page in fresh.items()))
        codes: list[int] = self._library.batch_put_from_multi_buffers(
            _names(list(fresh)), *self._parts(list(fresh.values()), sums)
        )
        written = codes.count(0)
        with self._counting:
            self.counts.bytes_written += written * self._page_bytes
        self._check(codes)
        return written

    def clear(self) -> None:
        """Removes every object whose name begins with kllm/, whoever has put it and even while others read it."""
        self._check([self._library.remove_by_regex(f"^{PREFIX}", True)])

    def _parts(self, pages: Sequence[memoryview], sums: ctypes.Array[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of what makes up each object."""
        first = ctypes.addressof(sums)
        addresses = [
            [np.frombuffer(page, np.uint8).ctypes.data, first + CHECKSUM_BYTES * i] for i, page in enumerate(pages)
        ]
        return addresses, [[self._page_bytes, CHECKSUM_BYTES]] * len(pages)

    def _check(self, codes: Sequence[int]) -> None:
        if min(codes, default=0) < 0:
            raise self._error(min(codes))

    def _error(self, code: int) -> StoreError:
        where = f"Mooncake (mooncake_master at {self._master})"
        if code in (RPC_FAIL, RPC_TIMEOUT):
            return StoreError(f"{where}: the master does not answer")
        if code in (SEGMENT_NOT_FOUND, NO_AVAILABLE_HANDLE):
            return StoreError(
                f"{where}: no room for a page of {self._page_bytes:,} bytes until pages are evicted; more memory comes "
                "with a larger l3_capacity, more instances or mooncake_client processes"
            )
        if code == TRANSFER_FAIL:
            return StoreError(f"{where}: a host that holds pages does not answer")
        return StoreError(f"{where}: error {code}, its reason is on stderr")


def _load() -> Any:
    """The class of the library, which is not imported before somebody wants it: it is large, and optional."""
    return load_library("mooncake.store").MooncakeDistributedStore


def load_library(module: str) -> Any:
    """A module of Mooncake. Raises StoreError, which says what to install."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise StoreError(f"Mooncake is not installed ({error}): {INSTALL_PACKAGE}") from error
    except ImportError as error:
        raise StoreError(f"Mooncake lacks a shared library ({error}); on Debian: {INSTALL_LIBRARIES}") from error


def _names(keys: Sequence[bytes]) -> list[str]:
    return [PREFIX + key.hex() for key in keys]


def _checksum(key: bytes, page: memoryview) -> int:
    """The key is part of it: Mooncake may reuse the memory of a page that is being read for another, whole one."""
    return xxhash.xxh3_64_intdigest(page, xxhash.xxh3_64_intdigest(key))
