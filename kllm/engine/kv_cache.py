"""KV tensors: memory for what a model's KVSpec declares, and how much of it to take."""

from __future__ import annotations

import math

import numpy as np
import torch

from kllm.cache.kv_spec import KVSpec
from kllm.config import KV_CACHE_SHARE
from kllm.models.interface import KVCache
from kllm.resources import available_memory


def allocate(spec: KVSpec, num_blocks: int) -> KVCache:
    """Record name to one tensor per layer, [num_blocks, block_tokens // stride, *shape].

    Zeroed, because attention multiplies masked rows by 0 and 0 * NaN is NaN. The memory comes from numpy, whose zeros
    are the operating system's untouched pages (torch.zeros writes them): it is taken as blocks are first used."""
    cache: KVCache = {}
    for record in spec.full_group().records:
        dtype: torch.dtype = getattr(torch, record.dtype)
        shape = (num_blocks, spec.block_tokens // record.stride, *record.shape)
        size = math.prod(shape) * dtype.itemsize
        cache[record.name] = [
            torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape) for _ in range(record.layers)
        ]
    return cache


def blocks_within(spec: KVSpec, memory: int | None, num_blocks: int | None, most_tokens: int) -> int:
    """How many blocks to allocate: exactly num_blocks, or what fits into `memory` bytes, or a share of what is
    available; never more than `most_tokens` need (all sequences at full length). Raises ValueError below 2."""
    if num_blocks is not None:
        return num_blocks
    page = spec.page_bytes()
    useful = -(-most_tokens // spec.block_tokens)
    room = memory if memory is not None else int(available_memory() * KV_CACHE_SHARE)
    blocks = room // page
    if blocks < 2:
        raise ValueError(f"the KV cache needs at least 2 blocks of {page} bytes, {room} bytes do not hold them")
    return min(blocks, useful)
