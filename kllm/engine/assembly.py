"""The scheduler of an instance and the tiers below its cache, made from its config: one place for every kind of
executor and memory."""

from __future__ import annotations

from collections.abc import Callable

from kllm.cache.events import EventSink
from kllm.cache.manager import KVManager
from kllm.cache.stores.store import Store
from kllm.cache.tiers.page_mover import PageMover
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.store_link import StoreLink
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.cache.tiers.workers import Workers
from kllm.cache.transfer.port import KvTransfer
from kllm.config import EngineConfig
from kllm.engine.core import EngineCore
from kllm.scheduling.prefill_policy import FairShare, FirstCome, PrefillPolicy
from kllm.scheduling.queue_policy import QUEUE_KEYS
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.time_slicing import TimeSlicing

STAGING_BYTES = 128 << 20  # of host memory where there is a store and no L2


def make_scheduler(
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    fingerprint: str = "",
    sink: EventSink | None = None,
) -> Scheduler:
    """num_blocks: KV blocks of config.block_size tokens that there is memory for. fingerprint: of the model's KVSpec.
    sink: hears what enters and leaves the prefix tree."""
    policy: PrefillPolicy = FirstCome()
    if config.scheduling_policy == "fair":
        growth = max(1, round(config.chunk_tokens * config.fair_growth))
        policy = FairShare(config.chunk_tokens, growth, num_blocks * config.block_size, config.fair_kv_share)
    named = config.stages or sink is not None
    kv = KVManager(
        num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        fingerprint=fingerprint if named else None,
        sink=sink,
        eviction=config.cache_eviction,
    )
    slicing = None
    if config.tpot_target_ms is not None:
        slicing = TimeSlicing(config.tpot_target_ms * 1e-3, config.prefill_every, config.max_num_batched_tokens)
    return Scheduler(
        kv,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        eos_token_ids=eos_token_ids,
        key=QUEUE_KEYS[config.scheduling_policy],
        policy=policy,
        max_overtakes=config.max_overtakes,
        looks_up=config.stages,
        slicing=slicing,
    )


def host_slots(config: EngineConfig, page_bytes: int) -> int:
    """Blocks that L2 holds. Raises ValueError for memory that is too little for any use."""
    staging = STAGING_BYTES if config.kv_transfer == "off" else config.transfer_memory
    num_slots = (config.l2_memory or staging) // page_bytes
    if num_slots < 2:
        name = "l2_memory" if config.l2_memory else "transfer_memory"
        raise ValueError(f"{name} needs at least {2 * page_bytes} bytes, two blocks of the KV cache")
    return num_slots


def put_tiers_below(
    core: EngineCore,
    config: EngineConfig,
    mover: PageMover,
    store: Store | None,
    fingerprint: str,
    workers: Workers,
    clock: Callable[[], float],
    sink: EventSink | None = None,
    transfer: KvTransfer | None = None,
) -> TieredCache:
    """L2, whose slots `mover` reaches, and L3 if there is a store, below the core's cache. fingerprint: of the model's
    KVSpec. clock: seconds on a steady clock. transfer: the way to other instances. Raises ValueError (see host_slots).
    """
    settings = TierSettings(
        staging=not config.l2_memory,
        write=config.l2_write if config.lower_tiers else "asked",
        min_reuse=config.l2_min_reuse,
        store_min_reuse=config.l3_min_reuse,
        fetch_base_s=config.fetch_base_s,
        fetch_per_kilotoken_s=config.fetch_per_kilotoken_s,
        predict=config.fetch == "predicted",
    )
    link = StoreLink(store, fingerprint, clock) if store is not None else None
    num_slots = host_slots(config, mover.page_bytes)
    tiers = TieredCache(core.scheduler.kv, num_slots, mover, link, settings, workers, clock, sink, transfer)
    core.use_tiers(tiers)
    return tiers
