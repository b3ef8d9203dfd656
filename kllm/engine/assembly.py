"""The scheduler of an instance, made from its config: one place for every kind of executor."""

from __future__ import annotations

from kllm.cache.manager import KVManager
from kllm.config import EngineConfig
from kllm.scheduling.prefill_policy import FairShare, FirstCome, PrefillPolicy
from kllm.scheduling.queue_policy import QUEUE_KEYS
from kllm.scheduling.scheduler import Scheduler


def make_scheduler(
    config: EngineConfig, *, num_blocks: int, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> Scheduler:
    """num_blocks: KV blocks of config.block_size tokens that there is memory for."""
    policy: PrefillPolicy = FirstCome()
    if config.scheduling_policy == "fair":
        growth = max(1, round(config.chunk_tokens * config.fair_growth))
        policy = FairShare(config.chunk_tokens, growth, num_blocks * config.block_size, config.fair_kv_share)
    return Scheduler(
        KVManager(num_blocks, config.block_size, config.enable_prefix_caching),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        eos_token_ids=eos_token_ids,
        key=QUEUE_KEYS[config.scheduling_policy],
        policy=policy,
        max_overtakes=config.max_overtakes,
    )
