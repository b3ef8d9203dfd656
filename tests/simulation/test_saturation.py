"""The rate at which a fleet saturates, held against the fleet itself."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import LinearTimes, small_instance

from kllm.costs.step import StepWork
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.load import mean_request
from kllm.simulation.saturation import InstanceLimits, MeanRequest, saturation_rate
from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.generators import random_samples, with_arrivals
from kllm.workload.sample import BLOCK, OWN, Sample, TokenSource

REQUEST = MeanRequest(input=60, cached=0, output=20)
LIMITS = InstanceLimits(kv_tokens=384, tokens_per_step=128, rows=16)


class MeanTimes:
    """LinearTimes without its noise, as a predictor has it."""

    def seconds(self, work: StepWork) -> float:
        return 5e-3 + 2e-4 * work.rows + 2e-5 * work.new_tokens


def waits_at(load: float) -> tuple[float, float]:
    """Mean time to first token of the first and the last third of 600 requests."""
    instances = 2
    rate = load * instances * saturation_rate(REQUEST, LIMITS, MeanTimes())
    samples = with_arrivals(random_samples(600, 60, 20), poisson_arrivals(rate, 1))
    spec = FleetSpec(instances=instances, instance=small_instance(pipeline_depth=1), times=LinearTimes, seed=1)
    ttfts = [outcome.ttft_s or 0.0 for outcome in run_fleet(spec, samples, TokenSource(1, 1000)).outcomes]
    return fmean(ttfts[:200]), fmean(ttfts[400:])


def test_below_saturation_queues_stay_and_above_they_grow() -> None:
    early, late = waits_at(0.75)
    assert late < 3 * early + 0.1
    early, late = waits_at(1.4)
    assert late > 2 * early


@given(st.floats(10, 300), st.floats(1, 60), st.floats(0, 0.9))
def test_more_work_a_request_means_fewer_requests(tokens: float, output: float, reuse: float) -> None:
    rate = saturation_rate(MeanRequest(tokens, 0, output), LIMITS, MeanTimes())
    assert 0 < saturation_rate(MeanRequest(tokens, 0, 2 * output), LIMITS, MeanTimes()) <= rate * 1.001
    assert saturation_rate(MeanRequest(tokens, reuse * tokens, output), LIMITS, MeanTimes()) >= rate * 0.999


def test_reuse_is_what_caches_of_that_size_find_when_requests_are_dealt_out_in_turn() -> None:
    shared = ((BLOCK, 1), 100)
    samples = [Sample((shared, ((OWN, index), 50)), 10) for index in range(8)]
    assert mean_request(samples, 1, 10_000).cached == pytest.approx(100 * 7 / 8)
    assert mean_request(samples, 2, 10_000).cached == pytest.approx(100 * 6 / 8)
    assert mean_request(samples, 1, 120).cached == 0, "what does not fit is not found"
    assert mean_request(samples, 1, 0).cached == 0


def test_a_prefix_is_found_only_up_to_what_is_missing() -> None:
    first = Sample((((BLOCK, 1), 100), ((BLOCK, 2), 100)), 1)
    second = Sample((((BLOCK, 1), 100), ((BLOCK, 3), 100), ((BLOCK, 2), 100)), 1)
    assert mean_request([first, second], 1, 10_000).cached == pytest.approx(100 / 2)


def test_the_same_samples_have_the_same_mean_whatever_the_order_of_lengths() -> None:
    rng = random.Random(3)
    samples = [Sample((((OWN, index), rng.randrange(1, 50)),), rng.randrange(1, 9)) for index in range(50)]
    mean = mean_request(samples, 3, 1000)
    assert mean.input == pytest.approx(fmean(sample.input_len for sample in samples))
    assert mean.output == pytest.approx(fmean(sample.output_len for sample in samples))
