from __future__ import annotations

from kllm.cluster.slo_load import SloLoad
from kllm.cluster.slo_snapshot import SloLimits, SloSnapshot
from kllm.simulation.slo_charts import slo_charts


def waiting_since(second: float, now: float) -> SloSnapshot:
    slo = SloLoad(SloLimits(2.0, 0.1))
    slo.arrived("a", second, 100, [])
    return slo.snapshot(now, [])


def test_one_chart_a_side_on_the_scale_of_the_slo() -> None:
    charts = slo_charts([(float(now), waiting_since(0.0, float(now))) for now in range(10)], 10.0)
    assert [chart.title for chart in charts] == ["SLO Load, prefill", "SLO Load, decode"]
    page = charts[0].html()
    for name in ("predicted", "measured, p90", "SLO"):
        assert name in page
    assert charts[0].y.high >= 4.5


def test_nothing_is_drawn_of_nothing() -> None:
    assert slo_charts([], 10.0) == []
