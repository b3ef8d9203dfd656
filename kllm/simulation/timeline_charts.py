"""Charts over simulated time: arrivals, queues, batches, KV and busy share, with faults as marks."""

from __future__ import annotations

import re
from collections.abc import Callable

from kllm.simulation import formats
from kllm.simulation.charts import Axis, Chart, linear_axis, percent_axis, time_axis
from kllm.simulation.series import Band, Intervals, Timelines

MOST_SMALL = 8  # instances that get a chart of their own; more are drawn as a band
_MOST_MARKS = 120  # faults marked on a chart
_MOST_LABELS = 12  # faults marked with their kind, too
_FAULT = re.compile(
    r"(?P<at>[0-9]+(?:\.[0-9]+)?) (?P<kind>[a-z-]+)(?: (?P<node>[0-9]+))?(?: for (?P<for>[0-9]+(?:\.[0-9]+)?))?"
)


def fleet_charts(lines: Timelines, faults: list[str]) -> list[Chart]:
    """One chart a quantity, all with the same time axis."""
    x = time_axis(lines.intervals.end)
    charts = [_rates(lines, x)]
    up = [value for value in lines.up if value is not None]
    spread = "instances: least to greatest" if max(up, default=0) > 1 else "least to greatest"
    for title, meaning, css, band in (
        ("Waiting", "requests queued at an instance", "b", lines.waiting),
        ("Running batch", "requests an instance works on", "a", lines.running),
    ):
        y = linear_axis(0, _top(band), "requests per instance", formats.round_count, most=4)
        charts.append(_banded(Chart(title, x, y, meaning), lines.intervals, band, css, spread, formats.count))
    for title, meaning, unit, css, band in (
        ("KV cache in use", "blocks that running requests hold", "% of an instance's blocks", "c", lines.kv_usage),
        ("Busy", "a step was computing", "% of the time", "d", lines.busy),
    ):
        chart = Chart(title, x, percent_axis(unit), meaning)
        charts.append(_banded(chart, lines.intervals, band, css, spread, formats.share))
    if lines.hits:
        charts.append(_hits(lines, x))
    if up and min(up) < max(up):
        y = linear_axis(0, max(up), "instances", formats.round_count, most=4)
        chart = Chart("In service", x, y, "instances that are up")
        chart.line(lines.intervals.middles, lines.up, "d")
        charts.append(chart)
    for number, chart in enumerate(charts):
        _mark_faults(chart, faults, labelled=number == 0)
    return charts


def instance_charts(lines: Timelines, faults: list[str]) -> list[Chart]:
    """KV use of each instance, and when it was down: small multiples with one scale."""
    x = time_axis(lines.intervals.end)
    charts = []
    for instance, band in lines.kv_by_instance.items():
        peak = max((value for value in band.high if value is not None), default=0.0)
        y = percent_axis("% of the cache", parts=2)
        chart = Chart(f"Instance {instance}", x, y, f"peak {formats.share(peak)}")
        _banded(chart, lines.intervals, band, "c", "", formats.share)
        for start, end in lines.down.get(instance, [])[:_MOST_MARKS]:
            chart.shade(start, end, "down")
        own = [fault for fault in faults if (match := _FAULT.match(fault)) and match["node"] == str(instance)]
        _mark_faults(chart, own, labelled=False)
        charts.append(chart)
    return charts


def _rates(lines: Timelines, x: Axis) -> Chart:
    top = max(*lines.arrivals, *lines.completions, 1e-3)
    y = linear_axis(0, top, "requests per second", formats.round_count, most=4)
    width = formats.round_seconds(lines.rates.width)
    chart = Chart("Arrivals and completions", x, y, f"requests, counted over {width}")
    middles = lines.rates.middles
    chart.band(middles, [0.0] * len(middles), lines.arrivals, "a")
    chart.line(middles, lines.arrivals, "a", "arrivals")
    chart.line(middles, lines.completions, "b", "completions")
    times = [formats.seconds(middle) for middle in middles]
    chart.hover(
        middles,
        [
            ("at", times),
            ("arrivals/s", [formats.count(value) for value in lines.arrivals]),
            ("completions/s", [formats.count(value) for value in lines.completions]),
        ],
    )
    return chart


def _hits(lines: Timelines, x: Axis) -> Chart:
    """The tiers above each other: the top of the last is the share found anywhere."""
    chart = Chart("Prefix hits", x, percent_axis("% of prompt tokens"), "found in a tier of the cache, summed up")
    middles = lines.rates.middles
    known = [place for place, value in enumerate(next(iter(lines.hits.values()))) if value is not None]
    base: list[float | None] = [None] * len(middles)
    for place in known:
        base[place] = 0.0
    for css, (name, values) in zip("cab", lines.hits.items(), strict=False):
        top = [None if low is None or value is None else low + value for low, value in zip(base, values, strict=True)]
        chart.band(middles, base, top, css)
        chart.line(middles, top, css, name)
        base = top
    readings = [("at", [formats.seconds(middles[place]) for place in known])]
    readings += [(name, [formats.share(values[place]) for place in known]) for name, values in lines.hits.items()]
    chart.hover([middles[place] for place in known], readings)
    return chart


def _banded(
    chart: Chart, intervals: Intervals, band: Band, css: str, spread: str, show: Callable[[float | None], str]
) -> Chart:
    """The mean as a line, least to greatest as an area."""
    middles = intervals.middles
    chart.band(middles, band.low, band.high, css, spread)
    chart.line(middles, band.mean, css, "mean" if spread else "")
    known = [place for place, value in enumerate(band.mean) if value is not None]
    chart.hover(
        [middles[place] for place in known],
        [
            ("at", [formats.seconds(middles[place]) for place in known]),
            ("mean", [show(band.mean[place]) for place in known]),
            ("least", [show(band.low[place]) for place in known]),
            ("greatest", [show(band.high[place]) for place in known]),
        ],
    )
    return chart


def _mark_faults(chart: Chart, faults: list[str], labelled: bool) -> None:
    """An upright mark where a fault begins, a shade for as long as it lasts; of all lines that say so."""
    found = [match for fault in faults[:_MOST_MARKS] if (match := _FAULT.match(fault))]
    for match in found:
        name = " ".join(filter(None, (match["kind"], match["node"])))
        start = float(match["at"])
        if match["for"]:
            chart.shade(start, start + float(match["for"]), "")
        chart.upright(start, "fault", name if labelled and len(found) <= _MOST_LABELS else "")


def _top(band: Band) -> float:
    return max((value for value in band.high if value is not None), default=1.0)
