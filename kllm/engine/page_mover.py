"""TensorPageMover: copies KV pages between the tensors of L1 and the slots of L2, where both are this host's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kllm.cache.kv_spec import KVSpec
from kllm.models.interface import KVCache


@dataclass(frozen=True)
class _Part:
    """One record of one layer: a row of bytes for each block, and the same bytes of each slot."""

    blocks: np.ndarray  # uint8 [num_blocks, size]
    slots: np.ndarray  # uint8 [num_slots, size], a view into the slots


class TensorPageMover:
    """The PageMover port, on one thread of its own: copies keep the order of the calls. numpy copies on that thread
    alone, without the interpreter lock; torch would wait for its pool, whose threads compute.

    slots: uint8 [num_slots, page_bytes], where others reach them too; by default memory of its own. That comes from
    numpy, whose zeros are the operating system's untouched pages: slots take memory when they are first used."""

    def __init__(self, cache: KVCache, spec: KVSpec, num_slots: int, slots: np.ndarray | None = None) -> None:
        self.page_bytes = spec.page_bytes()
        self._slots = np.zeros((num_slots, self.page_bytes), np.uint8) if slots is None else slots
        assert self._slots.shape == (num_slots, self.page_bytes)
        self._parts = _parts(cache, spec, self._slots)
        self._thread = ThreadPoolExecutor(1, "page-mover")
        self._last: asyncio.Future[None] | None = None

    def page(self, slot: int) -> memoryview:
        return memoryview(self._slots[slot])

    async def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        await self._begin(False, blocks, slots)

    async def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        await self._begin(True, blocks, slots)

    async def idle(self) -> None:
        if self._last is not None:
            await asyncio.wait([self._last])

    def _begin(self, to_device: bool, blocks: Sequence[int], slots: Sequence[int]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._copy, to_device, blocks, slots)
        self._last = future
        return asyncio.shield(future)

    def _copy(self, to_device: bool, blocks: Sequence[int], slots: Sequence[int]) -> None:
        in_l1, in_l2 = np.array(blocks), np.array(slots)
        for part in self._parts:
            if to_device:
                part.blocks[in_l1] = part.slots[in_l2]
            else:
                part.slots[in_l2] = part.blocks[in_l1]


def _parts(cache: KVCache, spec: KVSpec, slots: np.ndarray) -> list[_Part]:
    parts, offset = [], 0
    for record in spec.full_group().records:
        size = record.entry_bytes() * (spec.block_tokens // record.stride)
        for tensor in cache[record.name]:
            blocks = tensor.view(torch.uint8).view(len(tensor), size).numpy()
            parts.append(_Part(blocks, slots[:, offset : offset + size]))
            offset += size
    return parts
