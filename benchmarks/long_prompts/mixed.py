"""A mixed load with bursts: most prompts are short, a few are long; what its clients saw, and how that changed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kllm.telemetry.statistics import distribution
from kllm.workload.arrivals import bursty_arrivals
from kllm.workload.generators import LengthRange, long_short_samples, with_arrivals
from kllm.workload.sample import Sample

LONG_FROM = 4096  # tokens of the shortest long prompt
FIGURES = ("mean", "p50", "p90", "p95", "p99")
# Changes of TTFT and throughput that were reported for fair chunked prefill on mixed traffic, beside first come, first
# served, with chunks too.
REPORTED = {"mean": -0.1782, "p50": -0.2596, "p90": -0.1402, "p95": -0.1210, "p99": 0.0265}


@dataclass(frozen=True)
class MixedLoad:
    """rate: requests a second on average. They come in bursts: a Poisson process that is on for `on_s` and off for
    `off_s` seconds on average."""

    rate: float
    seconds: float
    seed: int
    long_share: float = 0.03
    short: LengthRange = (64, 512)
    long: LengthRange = (LONG_FROM, 8000)
    output: LengthRange = (16, 64)
    on_s: float = 5.0
    off_s: float = 5.0

    def samples(self) -> list[Sample]:
        """The same number of long prompts whatever the seed, at random places."""
        count = max(4, round(self.rate * self.seconds))
        arrivals = bursty_arrivals(self.rate * (self.on_s + self.off_s) / self.on_s, self.on_s, self.off_s, self.seed)
        times = list(itertools.islice(arrivals, count))
        factor = self.seconds / times[-1]  # the seeds differ in when requests come, not in how many do
        made = self._made(count)
        return with_arrivals(made, iter([time * factor for time in times]))

    def _made(self, count: int) -> list[Sample]:
        long = max(1, round(count * self.long_share))
        for attempt in itertools.count():
            made = long_short_samples(
                count, self.long_share, self.short, self.long, self.output, 1000 * self.seed + attempt
            )
            if sum(sample.input_len >= LONG_FROM for sample in made) == long:
                return made
        raise AssertionError


class Seen(msgspec.Struct):
    """What the clients of one run saw: (prompt tokens, TTFT in seconds) of every request, in the order of sending.
    tokens: of all prompts and outputs. duration_s: from the first request to the last one's end."""

    ttft: list[tuple[int, float]]
    tokens: int
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    def ttft_s(self, long: bool | None = None) -> dict[str, float]:
        """Its distribution: of all, or of the long or short prompts."""
        figures = distribution([wait for prompt, wait in self.ttft if long is None or (prompt >= LONG_FROM) == long])
        return {} if figures is None else figures


def compare(before: Sequence[Seen], after: Sequence[Seen]) -> dict[str, Any]:
    """Medians over the pairs of runs of what changed, as shares: -0.1 is a tenth less. Seconds are medians too."""
    pairs = list(zip(before, after, strict=True))
    changes = {name: [b.ttft_s()[name] / a.ttft_s()[name] - 1 for a, b in pairs] for name in FIGURES}
    speed = [b.tokens_per_s / a.tokens_per_s - 1 for a, b in pairs]
    return {
        "ttft_change": {name: round(statistics.median(values), 4) for name, values in changes.items()},
        "throughput_change": round(statistics.median(speed), 4),
        "of_each_pair": {
            name: [round(v, 4) for v in values] for name, values in (changes | {"throughput": speed}).items()
        },
        "before": _medians(before),
        "after": _medians(after),
    }


def _medians(runs: Sequence[Seen]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for title, long in (("ttft_s", None), ("ttft_s_short", False), ("ttft_s_long", True)):
        each = [run.ttft_s(long) for run in runs]
        figures[title] = {name: round(statistics.median(one[name] for one in each), 4) for name in FIGURES}
    return figures | {"tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1)}
