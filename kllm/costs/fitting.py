"""Fits FittedStepTime to recorded steps: non-negative least squares of the relative error, robust to outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kllm.costs.errors import CostError
from kllm.costs.fitted import FEATURES, REGIME_FEATURES, FitError, FittedStepTime, StepRecord, regime_of
from kllm.costs.nnls import FloatArray, solve_nonnegative

MIN_RECORDS = 20  # of all; and of a regime to have a fit of its own
_ROUNDS = 20
_HUBER = 1.345  # standard deviations up to which errors count in full: 95 % efficient for normal noise


def fit_step_time(records: Sequence[StepRecord], hardware: str) -> FittedStepTime:
    """The model of these records, with its error on them. hardware: what they were recorded on, in words.

    Each regime is fitted to its own records; one that has fewer than MIN_RECORDS, to all of them.
    Raises CostError if there are fewer than MIN_RECORDS altogether, or a time is not above 0.
    """
    if len(records) < MIN_RECORDS:
        raise CostError(f"{len(records)} recorded steps are too few to fit: {MIN_RECORDS} are needed")
    for index, record in enumerate(records):
        if not (math.isfinite(record.seconds) and record.seconds > 0):
            raise CostError(f"record {index}: seconds: not above 0: {record.seconds}")
    groups: dict[str, list[StepRecord]] = {regime: [] for regime in REGIME_FEATURES}
    for record in records:
        groups[regime_of(record.work)].append(record)
    coefficients = {}
    for regime, group in groups.items():
        coefficients[regime] = _fit(group if len(group) >= MIN_RECORDS else records, REGIME_FEATURES[regime])
    floor = min(record.seconds for record in records) / 2
    unjudged = FittedStepTime(hardware, coefficients, floor, {})
    errors = {name: fit_error(unjudged, group) for name, group in (groups | {"all": list(records)}).items() if group}
    return FittedStepTime(hardware, coefficients, floor, errors)


def fit_error(model: FittedStepTime, records: Sequence[StepRecord]) -> FitError:
    """How far the model is from these records, of which there is at least one."""
    predicted = np.array([model.seconds(record.work) for record in records])
    recorded = np.array([record.seconds for record in records])
    off = np.abs(predicted / recorded - 1)
    lower, upper = np.quantile(np.log(recorded / predicted), (0.25, 0.75))
    return FitError(
        records=len(records),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        bias=float(predicted.sum() / recorded.sum() - 1),
        sigma=float((upper - lower) / 1.349),  # the quartiles of a normal distribution are so far apart
    )


def _fit(records: Sequence[StepRecord], names: Sequence[str]) -> dict[str, float]:
    """Coefficients by feature.

    Rows are weighted by 1 / seconds at first and then by 1 / prediction: dividing by what was recorded would favour
    times that came out short. Huber's weights let far outliers pull no harder than moderate ones.
    """
    features = np.array([[FEATURES[name](record.work) for name in names] for record in records], dtype=np.float64)
    seconds = np.array([record.seconds for record in records])
    solution = _weighted(features, seconds, 1 / seconds)
    for _ in range(_ROUNDS):
        predicted = np.maximum(features @ solution, seconds.min() / 2)
        off = seconds / predicted - 1
        spread = float(np.median(np.abs(off))) / 0.6745 or 1e-9
        huber = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(off), 1e-300)))
        before, solution = solution, _weighted(features, seconds, huber / predicted)
        change = features @ np.abs(solution - before)
        if float(np.max(change / predicted)) < 1e-4:
            break
    return {name: float(value) for name, value in zip(names, solution, strict=True) if value > 0}


def _weighted(features: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    return solve_nonnegative(features * weights[:, None], seconds * weights)
