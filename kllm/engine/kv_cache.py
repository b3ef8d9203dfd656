"""KV tensors: memory for what a model's KVSpec declares, and how much of it to take."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch

from kllm.cache.kv_spec import KVSpec
from kllm.models.interface import KVCache

DEFAULT_SHARE = 0.25  # of available memory, when no size is given


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


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or the control group's limit if that is lower."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or another version of the interface: the machine's memory counts
    return max(available, 0)


def blocks_within(spec: KVSpec, memory: int | None, num_blocks: int | None, most_tokens: int) -> int:
    """How many blocks to allocate: exactly num_blocks, or what fits into `memory` bytes, or a share of what is
    available; never more than `most_tokens` need (all sequences at full length). Raises ValueError below 2."""
    if num_blocks is not None:
        return num_blocks
    page = spec.page_bytes()
    useful = -(-most_tokens // spec.block_tokens)
    room = memory if memory is not None else int(available_memory() * DEFAULT_SHARE)
    blocks = room // page
    if blocks < 2:
        raise ValueError(f"the KV cache needs at least 2 blocks of {page} bytes, {room} bytes do not hold them")
    return min(blocks, useful)
