"""Charts of SLO Load over simulated time: what was predicted and what was measured, of each side."""

from __future__ import annotations

from collections.abc import Sequence

from kllm.cluster.slo_snapshot import Pool, SloSnapshot
from kllm.simulation import formats
from kllm.simulation.charts import Axis, Chart, log_axis, time_axis

LEAST, LEAST_TOP = 0.05, 2.0  # of the scale
_TITLES: dict[Pool, str] = {"prefill": "SLO Load, prefill", "decode": "SLO Load, decode"}


def slo_charts(samples: Sequence[tuple[float, SloSnapshot]], end_s: float) -> list[Chart]:
    """One for each side of the pools. samples: (simulated seconds, SLO Load then)."""
    if not samples:
        return []
    x = time_axis(end_s)
    return [_chart(title, samples, pool, x) for pool, title in _TITLES.items()]


def _chart(title: str, samples: Sequence[tuple[float, SloSnapshot]], pool: Pool, x: Axis) -> Chart:
    times = [at for at, _ in samples]
    sides = [snapshot.pools[pool].side for _, snapshot in samples]
    predicted, measured = [side.predicted for side in sides], [side.measured for side in sides]
    y = log_axis(LEAST, max(LEAST_TOP, *predicted, *measured), "latency over the SLO", formats.count)
    of = "time to first token" if pool == "prefill" else "time per output token"
    chart = Chart(title, x, y, f"{of}: the larger one is the load; at 1 the SLO is just met")
    chart.line(times, predicted, "a", "predicted")
    chart.line(times, measured, "b", "measured, p90")
    chart.line([times[0], times[-1]], [1.0, 1.0], "d", "SLO")
    chart.hover(
        times,
        [
            ("at", [formats.seconds(at) for at in times]),
            ("predicted", [formats.count(value) for value in predicted]),
            ("measured", [formats.count(value) for value in measured]),
        ],
    )
    return chart
