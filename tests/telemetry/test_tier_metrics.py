from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kllm.messages import EngineLoad
from kllm.telemetry.families import Families
from kllm.telemetry.tier_counts import COUNTERS, TierCounts
from kllm.telemetry.tier_metrics import tier_metrics

DOCUMENTS = [Path(__file__).parents[2] / "docs" / name for name in ("cache.md", "kv-transfer.md")]


class _Collected:
    def __init__(self, loads: list[EngineLoad], totals: EngineLoad) -> None:
        self.families = list(tier_metrics(Families("m"), loads, totals))

    def collect(self) -> list[object]:
        return self.families


def samples(loads: list[EngineLoad], totals: EngineLoad) -> dict[str, float]:
    """By name, with the values of further labels, and of the engine where it is not 0."""
    registry = CollectorRegistry()
    registry.register(_Collected(loads, totals))  # type: ignore[arg-type]
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            engine = labels.pop("engine")
            found[" ".join([sample.name, *labels.values(), *([engine] if engine != "0" else [])])] = sample.value
    return found


def test_every_count_is_exported() -> None:
    """Each with another value, which must come up somewhere."""
    exported = [name for name in COUNTERS if name not in ("saved", "loaded", "stored", "fetched")]  # as bytes
    values = {name: 1000.0 + place for place, name in enumerate(exported)}
    found = samples([], EngineLoad(prefix_hits=100, l2_hits=30, l3_hits=20, wasted=7, tiers=TierCounts(**values)))  # type: ignore[arg-type]
    assert set(values.values()) <= set(found.values())
    assert found["kllm:prefix_cache_tier_hits_total l1"] == 50
    assert found["kllm:prefix_cache_tier_hits_total l2"] == 30
    assert found["kllm:prefix_cache_tier_hits_total l3"] == 20
    assert found["kllm:external_prefix_cache_hits_total"] == 50
    assert found["kllm:cache_wasted_blocks_total"] == 7
    assert found["kllm:cache_moved_bytes_total l3_to_l2"] == values["bytes_fetched"]
    assert found["kllm:cache_evicted_blocks_total l2"] == values["l2_evicted"]
    assert found["kllm:cache_dropped_blocks_total l2_to_l3"] == values["stores_dropped"]


def test_state_is_told_for_each_instance() -> None:
    loads = [
        EngineLoad(tiers=TierCounts(l2_blocks=3, l2_capacity=4)),
        EngineLoad(tiers=TierCounts(store_down=1, leases=5)),
    ]
    found = samples([*loads, EngineLoad()], EngineLoad(tiers=TierCounts()))
    assert [found[f"kllm:cache_l2_usage_perc{engine}"] for engine in ("", " 1", " 2")] == [0.75, 0, 0]
    assert [found[f"kllm:cache_store_down{engine}"] for engine in ("", " 1", " 2")] == [0, 1, 0]
    assert [found[f"kllm:kv_leases{engine}"] for engine in ("", " 1", " 2")] == [0, 5, 0]


def test_without_lower_tiers_there_are_none() -> None:
    assert samples([EngineLoad()], EngineLoad()) == {}


def test_every_metric_is_documented() -> None:
    told = set(re.findall(r"kllm:\w+", "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)))
    assert {name.split()[0] for name in samples([EngineLoad()], EngineLoad(tiers=TierCounts()))} <= told
