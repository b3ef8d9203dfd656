"""Metrics of routing: docs/routing.md says how to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from kllm.telemetry.families import Families


class Counts(Protocol):
    """The part of kllm.cluster.routing_log.RoutingCounts that is exported."""

    @property
    def reasons(self) -> Mapping[str, int]: ...

    @property
    def device(self) -> int: ...

    @property
    def host(self) -> int: ...

    @property
    def store(self) -> int: ...

    @property
    def nowhere(self) -> int: ...

    @property
    def spread(self) -> int: ...


class AnsweredCounts(Protocol):
    """The part of kllm.cluster.routing_log.InstanceCounts that is exported."""

    @property
    def answered(self) -> int: ...

    @property
    def believed(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def missed(self) -> int: ...


class KnownBlocks(Protocol):
    """The part of kllm.cluster.cache_directory.KnownCache that is exported."""

    @property
    def device_blocks(self) -> int: ...

    @property
    def host_blocks(self) -> int: ...

    @property
    def unreported_blocks(self) -> int: ...


class Instance(Protocol):
    """The part of kllm.cluster.routing_view.InstanceView that is exported."""

    @property
    def prefilling(self) -> int: ...

    @property
    def assigned(self) -> int: ...

    @property
    def blind(self) -> bool: ...

    @property
    def counts(self) -> AnsweredCounts: ...

    @property
    def cache(self) -> KnownBlocks | None: ...


class Directory(Protocol):
    """The part of kllm.cluster.routing_view.DirectoryView that is exported."""

    @property
    def blocks(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def gaps(self) -> int: ...

    @property
    def refused(self) -> int: ...


class View(Protocol):
    """The part of kllm.cluster.routing_view.RoutingView that is exported."""

    @property
    def counts(self) -> Counts: ...

    @property
    def directory(self) -> Directory | None: ...

    @property
    def instances(self) -> Sequence[Instance]: ...


def routing_metrics(families: Families, view: View) -> Iterator[Metric]:
    counts, instances = view.counts, view.instances
    yield families.counters(
        "routing_decisions", "Requests sent to an instance, by why to that one.", "reason", counts.reasons
    )
    where = {"device": counts.device, "host": counts.host, "store": counts.store, "none": counts.nowhere}
    yield families.counters(
        "routing_prompt_tokens", "Prompt tokens of them, by the tier believed to have them.", "tier", where
    )
    yield families.counter(
        "routing_spread_tokens",
        "Difference between the most and the fewest prompt tokens ahead at instances, added up over decisions.",
        counts.spread,
    )
    yield families.gauge(
        "routing_tokens_ahead", "Prompt tokens that an instance has yet to compute.", [x.prefilling for x in instances]
    )
    yield families.gauge("routing_requests_assigned", "Requests that it holds.", [x.assigned for x in instances])
    yield from _beliefs(families, instances)
    if view.directory is not None:
        yield from _directory(families, view.directory, instances)


def _beliefs(families: Families, instances: Sequence[Instance]) -> Iterator[Metric]:
    """What was believed to be cached beside what instances said they had."""
    counts = [instance.counts for instance in instances]
    kinds = {
        "prompt": sum(one.answered for one in counts),
        "believed": sum(one.believed for one in counts),
        "cached": sum(one.cached for one in counts),
        "missed": sum(one.missed for one in counts),
    }
    yield families.counters(
        "routing_answered_tokens",
        "Of requests that instances have begun to answer: prompt tokens, those believed to be cached there, those that "
        "the instance found, and those believed that it did not find.",
        "kind",
        kinds,
    )


def _directory(families: Families, directory: Directory, instances: Sequence[Instance]) -> Iterator[Metric]:
    known = [instance.cache for instance in instances]
    yield families.counter("cache_directory_gaps", "Reports of instances' caches found missing.", directory.gaps)
    yield families.counter("cache_directory_refused", "Blocks that did not fit into the index.", directory.refused)
    yield families.gauge("cache_directory_blocks", "Blocks known, whoever has them.", [directory.blocks])
    yield families.gauge("cache_directory_bytes", "Size of the index.", [directory.bytes])
    yield families.gauge(
        "cache_known_blocks",
        "Blocks that an instance is known to have, on its device and in host memory.",
        [0 if cache is None else cache.device_blocks + cache.host_blocks for cache in known],
    )
    yield families.gauge(
        "cache_unreported_blocks",
        "Blocks of prompts sent to an instance since it last said anything about its cache.",
        [0 if cache is None else cache.unreported_blocks for cache in known],
    )
    yield families.gauge(
        "cache_view_missing",
        "1 while nothing is believed of an instance's cache because what it holds has not come.",
        [float(instance.blind) for instance in instances],
    )
