"""What the lower tiers did, since the instance started. Totals; reported with the instance's load."""

from __future__ import annotations

import msgspec


class TierCounts(msgspec.Struct, frozen=False, omit_defaults=True):
    """Blocks unless a name says otherwise. L1 is the device, L2 host memory, L3 the store."""

    l1_evicted: int = 0
    l1_lost: int = 0  # of them, without a copy in L2
    l2_evicted: int = 0
    l3_evicted: int = 0
    l2_blocks: int = 0  # in use now
    l2_capacity: int = 0
    saved: int = 0  # L1 to L2
    loaded: int = 0  # L2 to L1
    stored: int = 0  # L2 to L3
    fetched: int = 0  # L3 to L2
    saves_dropped: int = 0  # overwritten on the device before they were copied, or no room in L2
    stores_dropped: int = 0  # the store did not keep up, or failed
    corrupt: int = 0  # pages whose checksum was wrong
    recomputed: int = 0  # found below, but computing was predicted cheaper
    late: int = 0  # lookups whose deadline passed
    store_errors: int = 0
    store_down: int = 0  # 1 while the store is left alone after errors
    exports: int = 0  # prompts whose blocks others may pull
    exported: int = 0  # their blocks
    leases: int = 0  # held now
    leases_expired: int = 0  # their time was over before anybody released them
    leases_revoked: int = 0  # given up for room
    pulled: int = 0  # from another instance to L2
    pull_failures: int = 0  # pulls that broke off or came too late
    pull_corrupt: int = 0  # pages pulled whose checksum was wrong: overwritten meanwhile, or damaged
    lookups: int = 0
    lookup_tokens: int = 0  # tokens of prompts that L1 lacked, whether or not it was worth looking below
    lookup_s: float = 0.0  # time that requests were held for lookups and fetches
    load_s: float = 0.0  # L2 to L1
    fetch_s: float = 0.0  # L3 to L2
    pull_s: float = 0.0  # another instance to L2
    export_s: float = 0.0  # from the end of a prefill to its lease: copies that were not done yet, and checksums
    bytes_saved: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    bytes_fetched: int = 0
    bytes_pulled: int = 0


OF_THE_MOMENT = frozenset({"l2_blocks", "l2_capacity", "leases", "store_down"})
COUNTERS = tuple(name for name in TierCounts.__struct_fields__ if name not in OF_THE_MOMENT)


def add_tier_counts(a: TierCounts | None, b: TierCounts | None) -> TierCounts | None:
    """Counters added, what is of the moment left out. None if neither has any."""
    if a is None or b is None:
        one = b if a is None else a
        return None if one is None else TierCounts(**{name: getattr(one, name) for name in COUNTERS})
    return TierCounts(**{name: getattr(a, name) + getattr(b, name) for name in COUNTERS})
