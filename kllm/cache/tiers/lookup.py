"""Lookup: one request's way through the tiers, and what it has brought."""

from __future__ import annotations

from array import array

from kllm.cache.manager import Holding
from kllm.cache.tiers.host_pool import HostBlock
from kllm.cache.tiers.prediction import Source
from kllm.messages import KvSource


class Brought:
    """Of one lookup: blocks that L1 had, and that came there from L2, from another instance and from L3."""

    __slots__ = ("l1", "l2", "l3", "peer")

    def __init__(self, l1: int) -> None:
        self.l1 = l1
        self.l2 = self.l3 = self.peer = 0

    def add(self, source: Source, blocks: int) -> None:
        setattr(self, source, getattr(self, source) + blocks)


class Lookup:
    """holding: what L1 has of it; None once it had to give way. source: where another instance has the prompt's leading
    blocks; None: there is none, or it has failed."""

    __slots__ = ("began", "brought", "copying", "deadline", "hashes", "holding", "limit", "source", "start", "tokens")

    def __init__(self, tokens: array[int], limit: int, holding: Holding, source: KvSource | None) -> None:
        self.tokens = tokens
        self.limit = limit  # tokens that may come from the cache
        self.holding: Holding | None = holding
        self.source = source
        self.start = len(holding.blocks)  # blocks that L1 had
        self.hashes: list[bytes] = []  # of the blocks after `start`
        self.copying = False
        self.began = self.deadline = 0.0
        self.brought = Brought(self.start)

    @property
    def at_peer(self) -> int:
        """Leading blocks of the prompt that another instance has."""
        return len(self.source.slots) if self.source is not None else 0


class Staged:
    """blocks: pinned in L2, ready. came: where those of them came from that L2 did not have."""

    __slots__ = ("blocks", "came")

    def __init__(self, blocks: list[HostBlock], came: dict[bytes, Source]) -> None:
        self.blocks = blocks
        self.came = came
