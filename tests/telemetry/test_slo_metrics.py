from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kllm.cluster.slo_load import SloLoad
from kllm.cluster.slo_prediction import InstanceReport
from kllm.cluster.slo_snapshot import SloLimits, SloSnapshot
from kllm.messages import EngineLoad, StepTimes
from kllm.telemetry.families import Families
from kllm.telemetry.slo_metrics import slo_metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "slo-load.md"


def snapshot() -> SloSnapshot:
    """Two instances of different roles; a request has waited for six seconds at the first."""
    slo = SloLoad(SloLimits(2.0, 0.1))
    slo.arrived("a", 0.0, 100, [])
    slo.submitted("a", 0.0, 0, 100)
    load = EngineLoad(step_times=StepTimes(0.05, 0.0, 0.0, 0.0, 10), kv_usage=0.45)
    return slo.snapshot(
        6.0,
        [InstanceReport(index=0, load=load, role="prefill"), InstanceReport(index=1, load=load, role="decode")],
    )


class _Collected:
    def __init__(self, shot: SloSnapshot) -> None:
        self.families = list(slo_metrics(Families("m"), shot))

    def collect(self) -> list[object]:
        return self.families


def samples(shot: SloSnapshot) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(_Collected(shot))  # type: ignore[arg-type]
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def test_pools_and_instances() -> None:
    found = samples(snapshot())
    assert found["kllm:slo_load prefill"] == 3.0
    assert found["kllm:slo_load_measured prefill"] == 3.0
    assert found["kllm:slo_load_predicted prefill"] == 0.025  # the report says that nothing is ahead any more
    assert found["kllm:slo_load_predicted decode"] == 0.5
    assert found["kllm:slo_load decode"] == 0.5
    assert found["kllm:instance_slo_load 0 prefill"] == 3.0
    assert found["kllm:instance_slo_load 1 decode"] == 0.5
    assert "kllm:instance_slo_load 0 decode" not in found
    assert "kllm:instance_slo_load 1 prefill" not in found
    assert found["kllm:slo_kv_guard 1"] == 0.5


def test_every_metric_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in {key.split()[0] for key in samples(snapshot())}:
        assert f"`{name}`" in text or f"`{name.replace('instance_', '')}`" in text
