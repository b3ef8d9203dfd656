"""From a WorkloadConfig to samples and arrival times."""

from __future__ import annotations

from collections.abc import Iterator

from kllm.workload.arrivals import bursty_arrivals, diurnal_arrivals, gamma_arrivals, poisson_arrivals
from kllm.workload.config import WorkloadConfig
from kllm.workload.generators import (
    long_short_samples,
    random_samples,
    session_samples,
    shared_prefix_samples,
    within,
)
from kllm.workload.sample import Sample


def synthetic_samples(dataset: str, config: WorkloadConfig) -> list[Sample]:
    """The requests of one of the SYNTHETIC kinds, all at second 0."""
    count, input_len, output_len = config.num_prompts, config.input_len, config.output_len
    if dataset == "shared-prefix":
        return shared_prefix_samples(count, config.num_prefixes, config.prefix_len, input_len, output_len)
    if dataset == "long-short":
        means = (input_len, config.long_input_len, output_len)
        short, long, output = (within(mean, config.length_spread) for mean in means)
        return long_short_samples(count, config.long_share, short, long, output, config.seed)
    if dataset == "sessions":
        return session_samples(
            count, config.turns, input_len, config.turn_len, output_len, config.think_time, config.seed
        )
    return random_samples(count, input_len, output_len, config.length_spread, config.seed)


def arrival_times(config: WorkloadConfig) -> Iterator[float]:
    """Endless times of the process that the config names; all 0 without a rate."""
    rate = float("inf") if config.request_rate is None else config.request_rate
    if config.arrivals == "gamma":
        return gamma_arrivals(rate, config.arrival_cv, config.seed)
    if config.arrivals == "bursty":
        on_rate = rate * (config.burst_on + config.burst_off) / config.burst_on
        return bursty_arrivals(on_rate, config.burst_on, config.burst_off, config.seed)
    if config.arrivals == "diurnal":
        return diurnal_arrivals(rate, config.diurnal_period, config.diurnal_amplitude, config.seed)
    return poisson_arrivals(rate, config.seed)
