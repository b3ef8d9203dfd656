"""MooncakeTransfer: slots that other hosts read through Mooncake's transfer engine, over TCP.

    mooncake:HOST:PORT:BASE      HOST, PORT: of the owner's engine; BASE: address of its first slot in its memory

There is no metadata server: engines ask each other for what they have registered (P2PHANDSHAKE). An owner's interpreter
takes no part in a read, its engine's threads do.

The engine has no passwords, and its ports are open on all interfaces: whoever reaches them may read and overwrite the
slots. They belong in a trusted network.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kllm.cache.stores.mooncake_client import P2P_HANDSHAKE, load_library
from kllm.cache.stores.store import StoreError
from kllm.cache.transfer.port import TransferError
from kllm.cache.transfer.reads import Read, Reads

PIECE_BYTES = 2 << 20  # in one call of the library, which ends when all of it has come or its time limits are over
SETTINGS = {"MC_TRANSFER_TIMEOUT": "5", "MC_HANDSHAKE_CONNECT_TIMEOUT": "2"}  # seconds; its own are 30 and more
ADDRESS = re.compile(r"mooncake:([^:]+|\[[0-9a-fA-F:]+\]):(\d{1,5}):([0-9a-f]{1,16})")
OPEN_LIMIT_S = 10.0


class MooncakeTransfer:
    """The KvTransfer port. slots: uint8 [num_slots, page_bytes], zeros that take memory once they are written. Made by
    open()."""

    def __init__(self, engine: Any, slots: np.ndarray, host: str) -> None:
        self.slots = slots
        self.address = f"mooncake:{host}:{engine.get_rpc_port()}:{slots.ctypes.data:x}"
        self._engine: Any = engine
        self._page_bytes = slots.shape[1]
        self._reads = Reads()

    @classmethod
    async def open(cls, num_slots: int, page_bytes: int, host: str) -> MooncakeTransfer:
        """host: the address under which others reach this host. Raises ValueError, for the operator."""
        slots = np.zeros((num_slots, page_bytes), np.uint8)
        try:
            engine = await asyncio.wait_for(asyncio.to_thread(_open_engine, slots, host), OPEN_LIMIT_S)
        except StoreError as error:
            raise ValueError(f"kv_transfer mooncake: {error}") from error
        except TimeoutError:
            raise ValueError(f"kv_transfer mooncake: no engine within {OPEN_LIMIT_S:g} s") from None
        return cls(engine, slots, host)

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        await self._reads.run(address, partial(self._copy, address, list(theirs), list(mine)), timeout_s)

    def _copy(self, address: str, theirs: list[int], mine: list[int], read: Read) -> None:
        """The library writes into a buffer of this call's own: it may still do so long after everybody has given up."""
        match = ADDRESS.fullmatch(address)
        if match is None:
            raise TransferError(f"not an address of Mooncake's transfer engine: {address!r}")
        host, port, base = match.groups()
        size, there = self._page_bytes, int(base, 16)
        most = max(1, PIECE_BYTES // size)
        buffer = np.empty((min(most, len(mine)), size), np.uint8)
        here = buffer.ctypes.data
        for start in range(0, len(mine), most):
            slots = mine[start : start + most]
            engine = self._engine
            if engine is None or not read.wanted:
                return
            to = [here + size * i for i in range(len(slots))]
            of = [there + size * slot for slot in theirs[start : start + most]]
            code = engine.batch_transfer_sync_read(f"{host}:{port}", to, of, [size] * len(slots))
            if code != 0:
                raise TransferError(f"{address} does not answer or has no such pages (error {code})")
            with read.lock:
                if not read.wanted:
                    return
                self.slots[slots] = buffer[: len(slots)]

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(self.slots.ctypes.data)


def _open_engine(slots: np.ndarray, host: str) -> Any:
    """Raises StoreError."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    engine = load_library("mooncake.engine").TransferEngine()
    if (code := engine.initialize(host, P2P_HANDSHAKE, "tcp", "")) != 0:
        raise StoreError(f"the engine cannot be set up as {host}: error {code}, its reason is on stderr")
    if (code := engine.register_memory(slots.ctypes.data, slots.nbytes)) != 0:
        raise StoreError(f"{slots.nbytes:,} bytes cannot be registered: error {code}, its reason is on stderr")
    return engine
