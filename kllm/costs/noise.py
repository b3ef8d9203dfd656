"""The truth that a simulation runs on: a cost model with coefficients of its own, and noise from step to step.

A predictor made of the same formulas would be right by construction; against this one it has to learn.
"""

from __future__ import annotations

import math
import random
from typing import Protocol

from kllm.costs.roofline import OPERATOR_CLASSES, RooflineModel
from kllm.costs.step import StepTimeModel, StepWork


class StepTimeSource(Protocol):
    """Seconds that a step really takes, above 0. Not pure: the same work takes another time the next time."""

    def draw(self, work: StepWork) -> float: ...


class NoisyStepTime:
    """A model's seconds times a lognormal factor of mean 1. sigma: standard deviation of its logarithm; 0: no noise.

    Draws from `rng` once a step, so one seed gives one history.
    """

    def __init__(self, model: StepTimeModel, rng: random.Random, sigma: float) -> None:
        if sigma < 0:
            raise ValueError(f"sigma is negative: {sigma}")
        self.model = model
        self.sigma = sigma
        self._gauss = rng.gauss
        self._shift = -sigma * sigma / 2

    def draw(self, work: StepWork) -> float:
        seconds = self.model.seconds(work)
        if not self.sigma:
            return seconds
        return seconds * math.exp(self._gauss(self._shift, self.sigma))


def perturbed(model: RooflineModel, rng: random.Random, spread: float) -> RooflineModel:
    """The same with every operator class made slower or faster by its own factor, between 1 - spread and 1 + spread."""
    if not 0 <= spread < 1:
        raise ValueError(f"spread must be from 0 to below 1: {spread}")
    return model.scaled({name: rng.uniform(1 - spread, 1 + spread) for name in OPERATOR_CLASSES})
