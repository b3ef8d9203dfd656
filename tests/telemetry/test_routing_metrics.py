"""Metrics of routing."""

from __future__ import annotations

from kllm.cluster.cache_directory import KnownCache
from kllm.cluster.routing_log import InstanceCounts, RoutingCounts, RoutingLog
from kllm.cluster.routing_view import DirectoryView, InstanceView, RoutingView
from kllm.telemetry.families import Families
from kllm.telemetry.routing_metrics import routing_metrics


def instance(index: int, blind: bool) -> InstanceView:
    cache = KnownCache(
        sequence=None if blind else 5, device_blocks=7, host_blocks=3, gaps=1, dumps=1, unreported_blocks=index
    )
    counts = InstanceCounts(answered=100, believed=60, cached=50, missed=10)
    return InstanceView(
        instance=index, ready=True, role="both", prefilling=10, assigned=2, blind=blind, counts=counts, cache=cache
    )


def view(directory: DirectoryView | None) -> RoutingView:
    counts = RoutingCounts(reasons={"load": 3, "leader": 1}, device=30, host=20, store=10, nowhere=40, spread=9)
    instances = [instance(0, False), instance(1, True)]
    return RoutingView(decisions=4, counts=counts, directory=directory, instances=instances, log=RoutingLog())


def figures(shown: RoutingView) -> dict[tuple[str, str], float]:
    """By name and the value of the last label."""
    return {
        (sample.name.removeprefix("kllm:"), list(sample.labels.values())[-1]): sample.value
        for family in routing_metrics(Families("m"), shown)
        for sample in family.samples
    }


def test_figures() -> None:
    found = figures(view(DirectoryView(blocks=9, bytes=1000, gaps=2, refused=0)))
    assert found["routing_decisions_total", "leader"] == 1
    assert found["routing_prompt_tokens_total", "none"] == 40
    assert found["routing_spread_tokens_total", "0"] == 9
    assert found["routing_answered_tokens_total", "believed"] == 120
    assert found["routing_answered_tokens_total", "missed"] == 20
    assert found["cache_view_missing", "0"] == 0
    assert found["cache_view_missing", "1"] == 1
    assert found["cache_unreported_blocks", "1"] == 1
    assert found["cache_known_blocks", "0"] == 10
    assert found["cache_directory_gaps_total", "0"] == 2


def test_without_a_directory_nothing_is_said_of_it() -> None:
    assert not any(name.startswith("cache_") for name, _ in figures(view(None)))
