"""Metrics of the tiered cache: L1 is the device, L2 host memory, L3 the store. docs/cache.md says how to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from kllm.telemetry.families import Families
from kllm.telemetry.tier_counts import TierCounts


class TierLoad(Protocol):
    """The part of kllm.messages.EngineLoad that is about tiers."""

    @property
    def prefix_hits(self) -> int: ...

    @property
    def l2_hits(self) -> int: ...

    @property
    def l3_hits(self) -> int: ...

    @property
    def wasted(self) -> int: ...

    @property
    def tiers(self) -> TierCounts | None: ...


def tier_metrics(families: Families, loads: Sequence[TierLoad], totals: TierLoad) -> Iterator[Metric]:
    """loads: of each instance, for what is of the moment. totals: counters of all, None in `tiers` if none has any."""
    tiers = totals.tiers
    if tiers is None:
        return
    yield from _hits(families, totals, tiers)
    yield from _moves(families, totals, tiers)
    yield from _troubles(families, tiers)
    yield from _transfers(families, tiers)
    now = [TierCounts() if load.tiers is None else load.tiers for load in loads]
    yield families.gauge(
        "cache_l2_usage_perc",
        "Share of host memory's blocks in use; 1 is all.",
        [tier.l2_blocks / tier.l2_capacity if tier.l2_capacity else 0.0 for tier in now],
    )
    yield families.gauge(
        "kv_leases", "Prompts whose KV is held for other instances now.", [tier.leases for tier in now]
    )
    yield families.gauge(
        "cache_store_down", "1 while the store is left alone after errors.", [tier.store_down for tier in now]
    )


def _hits(families: Families, totals: TierLoad, tiers: TierCounts) -> Iterator[Metric]:
    below = totals.l2_hits + totals.l3_hits
    yield families.counters(
        "prefix_cache_tier_hits",
        "Tokens found in the prefix cache, by the tier that had them.",
        "tier",
        {"l1": totals.prefix_hits - below, "l2": totals.l2_hits, "l3": totals.l3_hits},
    )
    yield families.counter(
        "external_prefix_cache_queries", "Tokens that the device lacked when their prompts came.", tiers.lookup_tokens
    )
    yield families.counter("external_prefix_cache_hits", "Tokens of them that came from lower tiers.", below)
    yield families.counter("cache_lookups", "Lookups in lower tiers.", tiers.lookups)
    yield families.counter(
        "cache_late_lookups", "Lookups whose deadline passed before all had come that was wanted.", tiers.late
    )
    yield families.counter(
        "cache_recomputed_blocks", "Blocks found below that were predicted to be cheaper computed.", tiers.recomputed
    )


def _moves(families: Families, totals: TierLoad, tiers: TierCounts) -> Iterator[Metric]:
    yield families.counters(
        "cache_moved_bytes",
        "Bytes copied between tiers.",
        "direction",
        {
            "l1_to_l2": tiers.bytes_saved,
            "l2_to_l3": tiers.bytes_stored,
            "l3_to_l2": tiers.bytes_fetched,
            "peer_to_l2": tiers.bytes_pulled,
            "l2_to_l1": tiers.bytes_loaded,
        },
    )
    yield families.counters(
        "cache_tier_seconds",
        "Time that requests were held for lookups, and that it took to read from the store and from other instances, "
        "to copy to the device, and to make KV ready for other instances.",
        "what",
        {
            "lookup": tiers.lookup_s,
            "fetch": tiers.fetch_s,
            "pull": tiers.pull_s,
            "load": tiers.load_s,
            "export": tiers.export_s,
        },
    )
    yield families.counters(
        "cache_evicted_blocks",
        "Blocks given up for room.",
        "tier",
        {"l1": tiers.l1_evicted, "l2": tiers.l2_evicted, "l3": tiers.l3_evicted},
    )
    yield families.counter(
        "cache_lost_blocks", "Blocks evicted from the device that host memory does not have.", tiers.l1_lost
    )
    yield families.counter(
        "cache_wasted_blocks", "Blocks brought up and gone again when their request was admitted.", totals.wasted
    )


def _troubles(families: Families, tiers: TierCounts) -> Iterator[Metric]:
    yield families.counters(
        "cache_dropped_blocks",
        "Blocks that were to be copied down and were not: overwritten first, no room, or the store failed.",
        "direction",
        {"l1_to_l2": tiers.saves_dropped, "l2_to_l3": tiers.stores_dropped},
    )
    yield families.counter("cache_corrupt_pages", "Pages of the store whose checksum was wrong.", tiers.corrupt)
    yield families.counter("cache_store_errors", "Calls of the store that failed.", tiers.store_errors)


def _transfers(families: Families, tiers: TierCounts) -> Iterator[Metric]:
    """Of KV between instances."""
    yield families.counter("kv_transfer_blocks", "Blocks of KV that instances took from others.", tiers.pulled)
    yield families.counter(
        "kv_transfer_failures",
        "Times that not all came that was asked for: the rest was computed.",
        tiers.pull_failures,
    )
    yield families.counter(
        "kv_transfer_corrupt",
        "Of them, because a page's checksum was wrong: overwritten meanwhile, or damaged.",
        tiers.pull_corrupt,
    )
    yield families.counter("kv_exports", "Prompts whose KV was made ready for other instances.", tiers.exports)
    yield families.counter("kv_exported_blocks", "Their blocks.", tiers.exported)
    yield families.counters(
        "kv_leases_lost",
        "Leases that ended before anybody released them: their time was over, or their room was needed.",
        "why",
        {"expired": tiers.leases_expired, "revoked": tiers.leases_revoked},
    )
