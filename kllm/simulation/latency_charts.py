"""Charts of latencies: cumulative distributions with their percentiles and limits, and TTFT against prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kllm.simulation import formats
from kllm.simulation.charts import SIZE, Chart, fitting_axis, percent_axis
from kllm.simulation.results import FleetResult, RequestOutcome
from kllm.telemetry.statistics import PromptClass, percentile, prompt_class

_POINTS = 400  # of a distribution's curve
_MARKED = (50, 95, 99)
_FEW = 500  # dots that may be larger
_CELLS = (260, 110)  # dots across and down: two requests of one cell are one dot


def latency_cdf(
    title: str,
    result: FleetResult,
    key: Literal["ttft_s", "tpot_s"],
    figures: dict[str, Any],
    limit_ms: float | None,
) -> Chart | None:
    """Share of completed requests that were at most this slow, TTFT for short and long prompts too where both are;
    None of nothing."""
    classes: dict[PromptClass, list[float]] = {"short": [], "long": []}
    for outcome in result.outcomes:
        if outcome.ending == "completed" and (value := getattr(outcome, key)) is not None:
            classes[prompt_class(outcome.prompt_tokens, result.chunk_tokens)].append(value)
    values = sorted(value for times in classes.values() for value in times)
    if not values:
        return None
    drawn = values if limit_ms is None else sorted([*values, limit_ms / 1e3])  # the limit is always on the axis
    x = fitting_axis(drawn, "latency", formats.round_seconds)
    y = percent_axis("% of completed requests at most this slow")
    chart = Chart(title, x, y, css="tall")
    shares = [place / _POINTS for place in range(_POINTS + 1)]
    if key == "ttft_s" and all(classes.values()):
        for (name, times), css in zip(classes.items(), ("c", "b"), strict=True):
            times.sort()
            chart.line([percentile(times, share * 100) for share in shares], shares, css, f"{name} prompts")
    latencies = [percentile(values, share * 100) for share in shares]
    chart.line(latencies, shares, "a", "all" if chart.legend else "")
    for percent in _MARKED:
        value = figures[f"p{percent}"]
        chart.point(value, percent / 100, "a", f"p{percent} {formats.seconds(value)}", above=percent != 99)
    if limit_ms is not None:
        within = sum(value * 1e3 <= limit_ms for value in values) / len(values)
        chart.upright(
            limit_ms / 1e3, "slo", f"SLO {formats.round_seconds(limit_ms / 1e3)}: {formats.share(within)} within"
        )
    chart.hover(
        latencies,
        [("at most", list(map(formats.seconds, latencies))), ("share", list(map(formats.share, shares)))],
    )
    return chart


def ttft_by_prompt(outcomes: Sequence[RequestOutcome], limit_ms: float | None) -> Chart | None:
    """A dot a request, or where they are dense one for many. Colour: whether the cache had most of the prompt."""
    served = [outcome for outcome in outcomes if outcome.ending == "completed" and outcome.ttft_s is not None]
    if not served:
        return None
    times = sorted(outcome.ttft_s for outcome in served if outcome.ttft_s is not None)
    lengths = sorted(float(outcome.prompt_tokens) for outcome in served)
    x = fitting_axis(lengths, "prompt, tokens", formats.round_count)
    y = fitting_axis(times, "time to first token", formats.round_seconds)
    chart = Chart("Time to first token by prompt length", x, y, css="tall")
    computed: set[tuple[int, int]] = set()
    cached: set[tuple[int, int]] = set()
    for outcome in served:
        cell = _cell(x.at(outcome.prompt_tokens), 1 - y.at(outcome.ttft_s or 0.0))
        (cached if outcome.cached_tokens * 2 >= outcome.prompt_tokens else computed).add(cell)
    chart.dots(sorted(computed), "b", "most of the prompt computed")
    chart.dots(sorted(cached), "c", "half or more from the cache")
    if len(computed) + len(cached) <= _FEW:
        chart.css += " few"
    chart.meaning = f"{len(served):,} requests, {len(computed) + len(cached):,} dots: near ones are drawn as one"
    if limit_ms is not None:
        height = round((1 - y.at(limit_ms / 1e3)) * SIZE)
        chart.marks.append(f'<path class="mark slo" d="M0 {height}H{SIZE}"/>')
        chart.legend.append(("slo", f"SLO {formats.round_seconds(limit_ms / 1e3)}"))
    return chart


def _cell(across: float, down: float) -> tuple[int, int]:
    columns, rows = _CELLS
    return round(round(across * columns) * SIZE / columns), round(round(down * rows) * SIZE / rows)
