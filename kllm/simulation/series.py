"""Samples and outcomes of a run as series over simulated time, down-sampled to a bounded number of intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kllm.simulation.results import InstanceSample, RequestOutcome

MOST_INTERVALS = 240
_REQUESTS_AN_INTERVAL = 12  # on average, or a rate is mostly noise
_FEWEST_RATES = 20
_WIDTHS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)  # seconds that people think in


@dataclass(slots=True)
class Band:
    """Least, mean and greatest value per interval; None where there was no sample."""

    low: list[float | None]
    mean: list[float | None]
    high: list[float | None]


@dataclass(slots=True)
class _Interval:
    low: float
    high: float
    total: float
    samples: int = 1

    def add(self, value: float) -> None:
        self.low = min(self.low, value)
        self.high = max(self.high, value)
        self.total += value
        self.samples += 1


@dataclass(frozen=True, slots=True)
class Intervals:
    """Equal intervals from 0 to the end of a run."""

    width: float
    number: int

    @classmethod
    def over(cls, span: float, shortest: float = 0.0) -> Intervals:
        """The narrowest familiar intervals of which `MOST_INTERVALS` cover `span` seconds, none below `shortest`."""
        span = max(span, 1e-3)
        for width in _WIDTHS:
            if width >= shortest and span <= width * MOST_INTERVALS:
                return cls(width, math.ceil(span / width))
        hours = 3600.0 * math.ceil(span / (3600.0 * MOST_INTERVALS))
        return cls(hours, math.ceil(span / hours))

    @property
    def middles(self) -> list[float]:
        return [(index + 0.5) * self.width for index in range(self.number)]

    @property
    def end(self) -> float:
        return self.number * self.width

    def index(self, time_s: float) -> int:
        return min(max(int(time_s / self.width), 0), self.number - 1)

    def index_before(self, time_s: float) -> int:
        """The interval that ends at `time_s` or holds it: where a sample belongs, which speaks for the time before."""
        return min(max(math.ceil(time_s / self.width) - 1, 0), self.number - 1)

    def per_second(self, times: Iterable[float]) -> list[float]:
        """Events per second in each interval."""
        counts = [0] * self.number
        for time in times:
            counts[self.index(time)] += 1
        return [count / self.width for count in counts]

    def shares(self, parts: Iterable[tuple[float, float, float]]) -> list[float | None]:
        """Of (time, part, whole) the sum of parts over the sum of wholes, None where there is nothing of which."""
        sums = [[0.0, 0.0] for _ in range(self.number)]
        for time_s, part, whole in parts:
            place = sums[self.index_before(time_s)]
            place[0] += part
            place[1] += whole
        return [part / whole if whole else None for part, whole in sums]

    def band(self, samples: Iterable[InstanceSample], value: Callable[[InstanceSample], float]) -> Band:
        """Over all samples of instances that are up."""
        intervals: list[_Interval | None] = [None] * self.number
        for sample in samples:
            if not sample.up:
                continue
            place = self.index_before(sample.time_s)
            interval, reading = intervals[place], float(value(sample))
            if interval is None:
                intervals[place] = _Interval(reading, reading, reading)
            else:
                interval.add(reading)
        return Band(
            [None if one is None else one.low for one in intervals],
            [None if one is None else one.total / one.samples for one in intervals],
            [None if one is None else one.high for one in intervals],
        )


@dataclass(slots=True)
class Timelines:
    """Everything the page draws over time. down: spans of seconds without service, by instance.

    rates: the intervals of arrivals, completions and hits, long enough for some requests each.
    hits: by tier, share of the prompt tokens of the requests that were admitted; those of tiers that had any.
    """

    intervals: Intervals
    rates: Intervals
    arrivals: list[float]
    completions: list[float]
    waiting: Band
    running: Band
    busy: Band
    kv_usage: Band
    kv_by_instance: dict[int, Band] = field(default_factory=dict)
    down: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    up: list[float | None] = field(default_factory=list)  # instances in service, mean per interval
    hits: dict[str, list[float | None]] = field(default_factory=dict)


def timelines(
    outcomes: Sequence[RequestOutcome], samples: Sequence[InstanceSample], simulated_s: float, most_instances: int
) -> Timelines:
    """Series of a run; KV by instance only where there are at most `most_instances`."""
    by_instance: dict[int, list[InstanceSample]] = {}
    for sample in samples:
        by_instance.setdefault(sample.instance, []).append(sample)
    ends = (max((one.end_s for one in outcomes), default=0.0), max((one.time_s for one in samples), default=0.0))
    span = max(simulated_s, *ends)
    intervals = Intervals.over(span, _sampling_period(by_instance.values()))
    rates = Intervals.over(span, min(_REQUESTS_AN_INTERVAL * span / max(len(outcomes), 1), span / _FEWEST_RATES))
    few = len(by_instance) <= most_instances
    return Timelines(
        intervals,
        rates,
        arrivals=rates.per_second(outcome.arrival_s for outcome in outcomes),
        completions=rates.per_second(outcome.end_s for outcome in outcomes if outcome.ending == "completed"),
        waiting=intervals.band(samples, lambda sample: sample.waiting),
        running=intervals.band(samples, lambda sample: sample.running),
        busy=intervals.band(samples, lambda sample: sample.busy),
        kv_usage=intervals.band(samples, lambda sample: sample.kv_usage),
        kv_by_instance={
            instance: intervals.band(own, lambda sample: sample.kv_usage)
            for instance, own in (sorted(by_instance.items()) if few else ())
        },
        down={instance: spans for instance, own in sorted(by_instance.items()) if (spans := _down(own))},
        up=_in_service(intervals, by_instance.values()),
        hits={
            name: rates.shares((sample.time_s, sample.hits[tier], sample.looked_up) for sample in samples)
            for tier, name in enumerate(("L1", "L2", "L3"))
            if any(sample.hits[tier] for sample in samples)
        },
    )


def _sampling_period(groups: Iterable[list[InstanceSample]]) -> float:
    """Seconds between samples: intervals below this would leave holes."""
    for samples in groups:
        if len(samples) > 1:
            return (samples[-1].time_s - samples[0].time_s) / (len(samples) - 1) * 0.999  # rounding must not widen
    return 0.0


def _down(samples: list[InstanceSample]) -> list[tuple[float, float]]:
    """Spans in which an instance was down, joined; a sample speaks for the time since the one before."""
    spans: list[tuple[float, float]] = []
    before = 0.0
    for sample in samples:
        if not sample.up:
            if spans and spans[-1][1] == before:
                spans[-1] = (spans[-1][0], sample.time_s)
            else:
                spans.append((before, sample.time_s))
        before = sample.time_s
    return spans


def _in_service(intervals: Intervals, groups: Iterable[list[InstanceSample]]) -> list[float | None]:
    """Mean number of instances that were up, per interval."""
    up: list[float] = [0.0] * intervals.number
    sampled = [False] * intervals.number
    for samples in groups:
        ups, seen = [0] * intervals.number, [0] * intervals.number
        for sample in samples:
            place = intervals.index_before(sample.time_s)
            seen[place] += 1
            ups[place] += sample.up
        for place in filter(seen.__getitem__, range(intervals.number)):
            up[place] += ups[place] / seen[place]
            sampled[place] = True
    return [value if known else None for value, known in zip(up, sampled, strict=True)]
