from __future__ import annotations

import math
import random
import statistics

import pytest

from kllm.costs.hardware import H200
from kllm.costs.layout import Layout
from kllm.costs.model_specs import GLM_5_2
from kllm.costs.noise import NoisyStepTime, perturbed
from kllm.costs.roofline import OPERATOR_CLASSES, RooflineModel
from kllm.costs.step import step_work

MODEL = RooflineModel(H200, GLM_5_2, Layout(tp=8))
WORK = step_work([(3000, 1, True)] * 20, 2048)


def test_noise_has_mean_1_and_the_spread_asked_for():
    source = NoisyStepTime(MODEL, random.Random(1), 0.1)
    ratios = [source.draw(WORK) / MODEL.seconds(WORK) for _ in range(20_000)]
    assert statistics.fmean(ratios) == pytest.approx(1, abs=0.003)
    assert statistics.stdev(map(math.log, ratios)) == pytest.approx(0.1, rel=0.03)


def test_one_seed_gives_one_history():
    first, second, other = (NoisyStepTime(MODEL, random.Random(seed), 0.1) for seed in (7, 7, 8))
    draws = [first.draw(WORK) for _ in range(10)]
    assert [second.draw(WORK) for _ in range(10)] == draws
    assert [other.draw(WORK) for _ in range(10)] != draws


def test_without_noise_it_is_the_model():
    assert NoisyStepTime(MODEL, random.Random(1), 0.0).draw(WORK) == MODEL.seconds(WORK)


def test_every_operator_class_gets_a_factor_of_its_own():
    truth = perturbed(MODEL, random.Random(3), 0.2)
    assert len(set(truth.factors.values())) == len(OPERATOR_CLASSES)
    assert all(0.8 <= factor <= 1.2 for factor in truth.factors.values())
    assert truth.seconds(WORK) != MODEL.seconds(WORK)
    assert perturbed(MODEL, random.Random(3), 0.2).factors == truth.factors
    assert perturbed(MODEL, random.Random(3), 0.0).seconds(WORK) == MODEL.seconds(WORK)


def test_spreads_that_could_make_time_stand_still_are_refused():
    with pytest.raises(ValueError, match="spread"):
        perturbed(MODEL, random.Random(1), 1.0)
    with pytest.raises(ValueError, match="sigma"):
        NoisyStepTime(MODEL, random.Random(1), -0.1)
