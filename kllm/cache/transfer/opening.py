"""The transfer that a config asks for."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from kllm.cache.transfer.port import KvTransfer


class SlotTransfer(KvTransfer, Protocol):
    """A transfer whose memory the slots of L2 are. slots: uint8 [num_slots, page_bytes]."""

    slots: np.ndarray


async def make_transfer(
    kind: Literal["off", "shm", "mooncake"], num_slots: int, page_bytes: int, host: str
) -> SlotTransfer | None:
    """kind: as EngineConfig.kv_transfer; None for off. host: the address of this host for Mooncake. Raises ValueError
    where it cannot be had, for the operator."""
    if kind == "shm":
        from kllm.cache.transfer.shared_memory import SharedMemoryTransfer

        try:
            return SharedMemoryTransfer(num_slots, page_bytes)
        except OSError as error:
            raise ValueError(f"kv_transfer shm: no shared memory: {error}") from error
    if kind == "mooncake":
        from kllm.cache.transfer.mooncake import MooncakeTransfer

        return await MooncakeTransfer.open(num_slots, page_bytes, host)
    return None
