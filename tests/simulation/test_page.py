"""The page of a simulated run: whole, self-contained, bounded, and safe whatever the texts in it say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet_results import add_tiers, make_result

from kllm.simulation import formats
from kllm.simulation.charts import Axis, Chart, fitting_axis, linear_axis, log_axis, time_axis
from kllm.simulation.page import render_page
from kllm.simulation.results import FleetResult, InstanceSample
from kllm.simulation.series import MOST_INTERVALS, Intervals, timelines
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo

MOST_BYTES = 1_500_000
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Elements and visible text; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def make_page(result: FleetResult, slo: Slo = Slo(2000, 50)) -> str:  # noqa: B008
    return render_page(result, summarise(result, slo))


def test_everything_is_on_it():
    reader = Reader(make_page(make_result()))
    for words in (
        *("Simulated fleet: glm-5.2 on h200", "Token ids are made from block ids.", "100 crash 1"),
        *("Goodput", "Prefix hit rate", "Cost", "Busy", "Load", "Waiting", "Running batch", "In service"),
        *("Instance 3", "simulated time, min", "requests per second", "% of completed requests at most this slow"),
        *("Time to first token by prompt length", "prompt, tokens", "crash 1", "slow 2", "c0ffee" * 8),
        *("Gave way", "1,243 times", "short prompts", "long prompts", "yields: 1,234, overtakes: 9"),
    ):
        assert words in reader.text
    assert reader.count("figure") == 6 + 4 + 2 + 1


def test_lower_tiers_are_on_it():
    reader = Reader(make_page(add_tiers(make_result())))
    assert reader.count("figure") == 7 + 4 + 2 + 1
    for words in (
        "Prefix hits",
        "Cache tiers",
        "4,321 blocks",
        "1,234 blocks, 4.32 GB, in 1.50 s",
        "10.0 ms on average",
    ):
        assert words in reader.text
    assert re.search(r"L1 \d+\.\d %, L2 \d+\.\d %, L3 \d+\.\d %", reader.text)
    assert "Cache tiers" not in make_page(make_result())


def test_it_loads_nothing_and_reads_without_script():
    page = make_page(make_result())
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [attrs for _, attrs in reader.tags if {"src", "href", "srcset", "onload", "onclick"} & set(attrs)]
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|eval\(", page)
    assert "prefers-color-scheme:dark" in page
    assert Reader(re.sub(r"<script>.*?</script>", "", page, flags=re.S)).text == reader.text


HOSTILE = "</dd></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def test_texts_from_outside_are_escaped():
    result = make_result()
    result.settings = {"model": HOSTILE, HOSTILE: HOSTILE, "nested": {"a": [HOSTILE]}, "none": None}
    result.notes = [HOSTILE]
    result.faults = [HOSTILE, f"12 crash 1 {HOSTILE}"]
    result.decision_hash = HOSTILE
    page = make_page(result)
    reader = Reader(page)
    assert reader.count("script") == 1
    assert reader.count("style") == 1
    assert reader.count("img") == 0
    assert HOSTILE in reader.text


@pytest.mark.parametrize(
    ("instances", "requests", "seconds"), [(1, 1, 2), (9, 300, 60), (40, 20_000, 600)], ids=["one", "some", "many"]
)
def test_its_size_has_a_bound(instances, requests, seconds):
    page = make_page(make_result(instances, requests, seconds))
    assert len(page.encode()) < MOST_BYTES
    Reader(page)


def test_long_lists_and_texts_are_cut_and_it_is_said():
    result = make_result()
    result.settings = {f"setting {index}": "x" * 10_000 for index in range(1000)}
    result.notes = ["y" * 10_000] * 1000
    result.faults = [f"{index / 100} crash {index % 4}" for index in range(10_000)]
    page = make_page(result)
    assert len(page.encode()) < MOST_BYTES
    assert "and 9,700 more" in page


def test_an_empty_run_has_a_page():
    reader = Reader(make_page(FleetResult([], [], "0", 0.0, 0.0, 0, 1), Slo()))
    assert "0 of 0" in reader.text


def test_few_instances_have_charts_of_their_own_and_many_a_band():
    assert "Instance 7" in make_page(make_result(8))
    many = make_page(make_result(9))
    assert "Instance 7" not in many
    assert "instances: least to greatest" in many


def test_the_limit_and_the_share_within_it_are_marked():
    text = Reader(make_page(make_result(), Slo(ttft_ms=2000))).text
    assert re.search(r"SLO 2 s: \d+\.\d % within", text)
    assert "SLO 2 s" not in Reader(make_page(make_result(), Slo())).text


def test_the_pointers_readings_belong_to_their_places():
    reader = Reader(make_page(make_result()))
    hovers = [json.loads(attrs["data-hover"]) for _, attrs in reader.tags if "data-hover" in attrs]
    assert len(hovers) >= 10
    for places, readings in hovers:
        assert places == sorted(places)
        assert all(len(texts) == len(places) for _, texts in readings)


def test_the_same_result_gives_the_same_page():
    assert make_page(make_result()) == make_page(make_result())


# -- series ------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e7), st.floats(0, 100))
def test_intervals_cover_the_run_and_are_not_many(span, shortest):
    intervals = Intervals.over(span, shortest)
    assert 1 <= intervals.number <= MOST_INTERVALS
    assert intervals.end >= span
    assert intervals.width >= shortest


def test_rates_count_every_request():
    result = make_result()
    lines = timelines(result.outcomes, result.samples, result.simulated_s, 8)
    assert sum(lines.arrivals) * lines.rates.width == pytest.approx(500)


def test_a_band_is_of_instances_in_service():
    samples = [
        InstanceSample(time, instance, not (instance == 1 and time == 2.0), running, 0, 0.5, 1.0, 1.0, 1.0)
        for time, instance, running in [(1.0, 0, 4), (1.0, 1, 8), (2.0, 0, 6), (2.0, 1, 0), (3.0, 0, 1), (3.0, 1, 3)]
    ]
    lines = timelines([], samples, 3.0, 8)
    running = [(low, mean, high) for low, mean, high in zip(*map(known, lines_of(lines)), strict=True)]
    assert running == [(4, 6, 8), (6, 6, 6), (1, 2, 3)]
    assert known(lines.up) == [2, 1, 2]
    assert lines.down == {1: [(1.0, 2.0)]}


def test_hits_are_shares_of_what_was_looked_up():
    samples = [
        InstanceSample(time, 0, True, 0, 0, 0.0, 0.0, 0.0, 0.0, looked_up, hits)
        for time, looked_up, hits in [(1.0, 100, (10, 0, 5)), (2.0, 0, (0, 0, 0)), (3.0, 300, (0, 0, 30))]
    ]
    lines = timelines([], samples, 3.0, 8)
    assert set(lines.hits) == {"L1", "L3"}
    assert sum(known(lines.hits["L3"])) == pytest.approx(0.05 + 0.1)
    assert known(lines.hits["L1"]) == [0.1, 0.0]


def lines_of(lines):
    return lines.running.low, lines.running.mean, lines.running.high


def known(values):
    return [value for value in values if value is not None]


# -- axes and formats --------------------------------------------------------------------------------------------

positive = st.floats(1e-6, 1e9)


@given(positive, positive)
def test_axes_hold_their_values_with_few_ticks(one, other):
    low, high = sorted((one, other))
    for axis in (
        linear_axis(0, high, "", formats.count),
        log_axis(low, high, "", formats.count),
        fitting_axis([low, high], "", formats.count),
        time_axis(high),
    ):
        assert 1 <= len(axis.ticks) <= 20
        assert axis.high >= high * (1 - 1e-6)
        assert all(0 <= axis.at(value) <= 1 for value, _ in axis.ticks)
        assert axis.at(low) <= axis.at(high)


def test_wide_ranges_are_logarithmic_and_narrow_ones_are_not():
    assert fitting_axis([0.01, 0.1, 3.0], "", formats.seconds).log
    assert not fitting_axis([0.02, 0.03, 0.05], "", formats.seconds).log


def test_lines_break_where_nothing_is_known():
    axis = Axis(0.0, 4.0, [], "")
    chart = Chart("", axis, axis)
    chart.line([0, 1, 2, 3, 4], [1, 2, None, 3, 4], "a")
    assert re.search(r'd="(M[^M"]+)(M[^M"]+)"', chart.marks[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (2.5e-5, "25 µs"), (0.0124, "12.4 ms"), (0.9999, "1.00 s"), (1.4159, "1.42 s"), (75, "75.0 s")]
    + [(750, "12.5 min"), (7200, "2.00 h"), (None, "–")],
)
def test_times_as_people_read_them(value, text):
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (0.126, "0.13"), (12345.6, "12,346"), (1_234_567, "1.23 M"), (4.5e9, "4.50 G")]
)
def test_counts_as_people_read_them(value, text):
    assert formats.count(value) == text
