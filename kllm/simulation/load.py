"""The load of a simulated run: samples of a trace or made up, and how fast they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kllm.simulation.config import SimulationConfig
from kllm.simulation.saturation import MeanRequest
from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.config import SYNTHETIC
from kllm.workload.generators import with_arrivals
from kllm.workload.offered import arrival_times, synthetic_samples
from kllm.workload.replay import describe_scaling, trace_samples
from kllm.workload.sample import Key, Sample
from kllm.workload.traces import TraceRow, read_trace

SESSION_LOAD = 0.5  # of saturation, for traces whose sessions have no common clock, unless one is asked for
MADE_UP = 1000  # requests, unless a number is asked for


class LoadError(ValueError):
    """The load that was asked for cannot be made; the message says why."""


@dataclass(frozen=True)
class Load:
    """saturation_rps: requests a second that saturate the fleet if they are dealt out in turn.

    native: the load's own rate as a share of that, None if it has no rate. load: that of `samples`. notes: what was
    changed, in sentences.
    """

    samples: list[Sample]
    saturation_rps: float
    native: float | None
    load: float | None
    notes: list[str]


def make_load(config: SimulationConfig, kv_tokens: int, saturation_of: Callable[[MeanRequest], float]) -> Load:
    """kv_tokens: that an instance holds. saturation_of: requests a second that saturate the fleet when its requests
    are like this on average. Raises TraceError, LoadError."""
    kept_tokens = kv_tokens if config.enable_prefix_caching else 0

    def saturation_with(samples: Sequence[Sample]) -> float:
        return saturation_of(mean_request(samples, config.prefill or config.instances, kept_tokens))

    if config.trace not in SYNTHETIC:
        rows = read_trace(config.trace, limit_requests=config.num_prompts, limit_seconds=config.limit_seconds)
        if any(row.session is not None for row in rows):
            return _sessions(config, rows, saturation_with)
        samples = trace_samples(rows, config.scale)
        if config.request_rate is not None:
            samples = with_arrivals(samples, arrival_times(config))
    else:
        made = config.model_copy(update={"num_prompts": config.num_prompts or MADE_UP})
        samples = with_arrivals(synthetic_samples(config.trace, made), arrival_times(config))
    saturation = saturation_with(samples)
    native = _rate(samples) / saturation if _rate(samples) else None
    speed_up = 1.0
    if config.load is not None:
        if native is None:
            raise LoadError("these requests have no rate that a load could scale: give a request rate")
        speed_up = config.load / native
        samples = [s if s.after is not None else replace(s, arrival_s=s.arrival_s / speed_up) for s in samples]
    return Load(samples, saturation, native, config.load or native, _notes(config, speed_up))


def _notes(config: SimulationConfig, speed_up: float) -> list[str]:
    if config.trace not in SYNTHETIC:
        return describe_scaling(config.scale, speed_up)
    return [] if speed_up == 1.0 else [f"requests come {speed_up:.4g} times as fast as asked for, to make the load"]


def _sessions(
    config: SimulationConfig, rows: Sequence[TraceRow], saturation_with: Callable[[Sequence[Sample]], float]
) -> Load:
    """Conversations that each have a clock of their own: they start as a Poisson process."""
    saturation = saturation_with(trace_samples(rows, config.scale))
    load = config.load or SESSION_LOAD
    roots = {row.session for row in rows if row.parent is None}
    rate = load * saturation * len(roots) / len(rows)
    samples = trace_samples(rows, config.scale, 1.0, poisson_arrivals(rate, config.seed))
    notes = [*describe_scaling(config.scale), f"conversations start as a Poisson process of {rate:.4g} a second"]
    return Load(samples, saturation, None, load, notes)


def mean_request(samples: Sequence[Sample], instances: int, kv_tokens: int) -> MeanRequest:
    """What the requests are on average when they are dealt out in turn to instances that keep `kv_tokens` tokens of
    what they computed, least recently used out first. 0: nothing is kept. Any router should do better."""
    caches = [_RunCache(kv_tokens) for _ in range(instances)]
    cached = sum(caches[index % instances].take(sample) for index, sample in enumerate(samples))
    return MeanRequest(
        input=fmean(sample.input_len for sample in samples),
        cached=cached / len(samples),
        output=fmean(sample.output_len for sample in samples),
    )


class _RunCache:
    """Which runs of tokens an instance has, by their keys."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._lengths: OrderedDict[Key, int] = OrderedDict()

    def take(self, sample: Sample) -> int:
        """Tokens of the prompt that are there; afterwards all of it is, if it fits."""
        cached, matching = 0, True
        for key, length in sample.parts:
            before = self._lengths.pop(key, 0)
            cached += min(before, length) if matching else 0
            matching = matching and before >= length
            self._lengths[key] = max(before, length)
            self._left -= max(length - before, 0)
        while self._left < 0:
            _, length = self._lengths.popitem(last=False)
            self._left += length
        return cached


def _rate(samples: Sequence[Sample]) -> float:
    """Requests a second, counting later turns with the conversation they belong to; 0 if all come at once."""
    arrivals = [sample.arrival_s for sample in samples if sample.after is None]
    span = max(arrivals) - min(arrivals)
    return len(samples) / span if span else 0.0
