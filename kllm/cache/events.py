"""Cache events: what entered and left a cache, in which tier, so that others can know where each prefix lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import msgspec


class Medium(Enum):
    """Where blocks are: L1, L2 and L3."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, frozen=True):
    """Consecutive blocks are there now. parent: hash of the block before the first; None: it is the first of its
    prefix, or unknown. tokens: of all these blocks; empty where only hashes are known (lower tiers)."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    block_tokens: int
    medium: Medium
    salt: str = ""
    adapter: str = ""


class BlockRemoved(msgspec.Struct, frozen=True):
    """These blocks are not there any more."""

    hashes: Sequence[bytes]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Everything is gone, in every tier of the instance."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
EventSink = Callable[[CacheEvent], None]  # must return at once
