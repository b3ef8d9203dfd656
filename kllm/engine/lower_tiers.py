"""The tiers below an engine's KV cache, made from its config: host memory, a store on disk or in Mooncake, and the way
to other instances' host memory."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kllm.cache.events import EventSink
from kllm.cache.kv_spec import KVSpec
from kllm.cache.stores.store import Store
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.cache.tiers.workers import Workers
from kllm.cache.transfer.opening import make_transfer
from kllm.config import EngineConfig
from kllm.engine.assembly import host_slots, put_tiers_below
from kllm.engine.core import EngineCore
from kllm.engine.page_mover import TensorPageMover
from kllm.models.interface import KVCache

SWITCH_S = 5e-4  # how long a thread keeps the interpreter that another wants; Python's own is ten times that
END_BYTES = 1 << 20  # read at both ends of a weight file, to tell models apart
SAMPLE_BYTES = 1 << 12  # and between them, here and there
MOST_SAMPLES = 1024  # of a file


def share_interpreter() -> None:
    """The threads that move pages must not hold up the thread that plans steps: it gets the interpreter lock sooner."""
    sys.setswitchinterval(SWITCH_S)


async def open_tiers(
    config: EngineConfig, core: EngineCore, cache: KVCache, spec: KVSpec, workers: Workers, sink: EventSink | None
) -> TieredCache | None:
    """Put what the config asks for below the engine's cache; None if that is nothing. Raises StoreError if the store
    cannot be opened, ValueError for memory that holds no block or cannot be shared."""
    if not config.stages:
        return None
    share_interpreter()
    page = spec.page_bytes()
    num_slots = host_slots(config, page)
    transfer = await make_transfer(config.kv_transfer, num_slots, page, config.kv_transfer_host)
    mover = TensorPageMover(cache, spec, num_slots, transfer.slots if transfer is not None else None)
    store = await _open_store(config, page) if config.l3 is not None else None
    return put_tiers_below(core, config, mover, store, spec.fingerprint, workers, time.monotonic, sink, transfer)


async def _open_store(config: EngineConfig, page_bytes: int) -> Store:
    place = config.l3 or ""
    if place.startswith("mooncake://"):
        from kllm.cache.stores.mooncake import MooncakeStore

        master = place.removeprefix("mooncake://")
        return await MooncakeStore.connect(master, page_bytes, segment_bytes=config.l3_capacity)
    if re.match(r"[a-z]+://", place):
        raise ValueError(f"l3 is a folder or mooncake://HOST:PORT, not {place!r}")
    from kllm.cache.stores.disk import DiskStore

    return DiskStore(Path(place), page_bytes, config.l3_capacity)


def identify(files: Sequence[Path], model: dict[str, Any], config: EngineConfig, operators: str) -> str:
    """Names weights and numerics, so that KV is shared only where it would be the same: samples all over every weight
    file (reading all of a large model would take longer than loading it), what the model's configuration says, since
    keys are rotated as it says, and what computes with them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _samples(size):
                file.seek(start)
                digest.update(file.read(length))
    numerics = [config.dtype, config.quantization, config.activations, config.kv_cache_dtype, operators]
    digest.update(msgspec.json.encode([model, numerics], order="sorted"))
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Parts of a file, as (start, length): its ends, and a little of every MiB, or of less where that were too many."""
    every = max(1 << 20, size // MOST_SAMPLES)
    between = [(start, SAMPLE_BYTES) for start in range(END_BYTES, size - END_BYTES, every)]
    return [(0, END_BYTES), *between, (max(0, size - END_BYTES), END_BYTES)]
