"""What an operator sees of routing: the log's figures beside the state of every instance, at one moment."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kllm.cluster.cache_directory import CacheDirectory, KnownCache
from kllm.cluster.routing_log import Decision, InstanceCounts, RoutingCounts, RoutingLog
from kllm.cluster.slot import Slot


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """ready, prefilling, assigned: as a router sees it; zeros while it is not ready. cache: None where nobody asks.

    blind: it says what it caches, or should, and nothing is believed of it: its dump has not come."""

    instance: int
    ready: bool
    role: str
    prefilling: int
    assigned: int
    blind: bool
    counts: InstanceCounts
    cache: KnownCache | None


class DirectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """blocks: known, whoever has them. bytes: of its tables. gaps: reports found missing. refused: did not fit."""

    blocks: int
    bytes: int
    gaps: int
    refused: int


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """latest, sampled: decisions, oldest first (see RoutingLog). directory: None where no caches are watched."""

    decisions: int
    counts: RoutingCounts
    directory: DirectoryView | None
    instances: list[InstanceView]
    log: RoutingLog

    @property
    def latest(self) -> list[Decision]:
        return self.log.latest

    @property
    def sampled(self) -> list[Decision]:
        return self.log.sampled


def routing_view(slots: Sequence[Slot], directory: CacheDirectory | None, log: RoutingLog) -> RoutingView:
    known = None
    if directory is not None:
        known = DirectoryView(
            blocks=directory.num_blocks,
            bytes=directory.bytes_used,
            gaps=directory.num_gaps,
            refused=directory.num_refused,
        )
    instances = [_instance(slot, directory, log) for slot in slots]
    return RoutingView(decisions=log.num_decisions, counts=log.counts, directory=known, instances=instances, log=log)


def _instance(slot: Slot, directory: CacheDirectory | None, log: RoutingLog) -> InstanceView:
    candidate = slot.candidate() if slot.ready else None
    cache = None if directory is None else directory.known(slot.index)
    reports = slot.hello is not None and bool(slot.hello.fingerprint)
    return InstanceView(
        instance=slot.index,
        ready=slot.ready,
        role=slot.role,
        prefilling=0 if candidate is None else candidate.prefilling,
        assigned=0 if candidate is None else candidate.assigned,
        blind=reports and cache is not None and cache.sequence is None,
        counts=log.instances.get(slot.index) or InstanceCounts(),
        cache=cache,
    )
