"""OnlineStepTimes: how long an engine's steps take, learned from the steps themselves while it serves.

    seconds = base + row * rows + new_token * new tokens + context_token * context        (see StepWork)

Steps of one kind come in long runs: thousands that decode much the same rows, then a few with a prompt. The latest
steps alone would not tell what a token of a prompt costs. So a few of the latest of every kind are kept, and older
ones count less: they decide only what later ones say nothing about. A machine that becomes slower or faster does so for
all kinds: when the latest steps all take another time than was expected, what is kept of earlier ones is brought to
that level.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from kllm.costs.nnls import FloatArray, solve_nonnegative
from kllm.costs.step import StepWork

KEPT = 8  # latest steps of each kind
HALF_LIFE = 128  # steps after which a step counts half
LEAST_WEIGHT = 0.02  # of a step, however old it is
TURNS = 3  # of fitting and weighing down what is far off
FAR_OFF = 2.5  # typical errors
LEAST_ERROR = 0.02  # relative; smaller ones are never far off
TIE = 1e-3  # weight of the belief that a row costs nothing beside its token, where steps do not tell
LATEST = 24  # steps whose typical time tells the machine's level
OTHER_LEVEL = 1.25  # times as slow or as fast as expected
AS_EXPECTED = 1.04
FIT_EVERY_S, REST_S = 1.0, 5.0  # REST_S: while steps take the time that is expected

_Step = tuple[int, int, int, int, float]  # number, rows, new tokens, context, seconds


class StepFit(NamedTuple):
    """Seconds, all at least 0. samples: steps that they were fitted to."""

    base: float = 0.0
    row: float = 0.0
    new_token: float = 0.0
    context_token: float = 0.0
    samples: int = 0


class OnlineStepTimes:
    """observe() every step, fit() now and then. Pure: the same steps, the same figures."""

    def __init__(self) -> None:
        self._kinds: dict[int, list[_Step]] = {}
        self._count = 0
        self._latest: deque[_Step] = deque(maxlen=LATEST)
        self._fitted = StepFit()
        self._fitted_count = 0
        self._fitted_at = 0.0

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took this long (above 0), from the end of the one before it or from its own start, whichever came
        later."""
        rows, tokens, context = work.rows, work.new_tokens, work.context
        kind = (tokens.bit_length() << 8 | context.bit_length() << 1) + (tokens > rows)
        step = (self._count, rows, tokens, context, seconds)
        steps = self._kinds.get(kind)
        if steps is None:
            self._kinds[kind] = [step]
        elif len(steps) < KEPT:
            steps.append(step)
        else:
            steps[steps.index(min(steps))] = step
        self._latest.append(step)
        self._count += 1

    def fit(self, now: float) -> StepFit:
        """What the steps so far tell; made anew every few seconds of the caller's clock at most."""
        if self._count == self._fitted_count:
            return self._fitted
        age = now - self._fitted_at
        if self._fitted_count and 0.0 <= age < FIT_EVERY_S:
            return self._fitted
        level = self._level()
        if self._fitted_count > 2 * HALF_LIFE and 1 / AS_EXPECTED < level < AS_EXPECTED and 0.0 <= age < REST_S:
            return self._fitted
        if len(self._latest) == LATEST and not 1 / OTHER_LEVEL < level < OTHER_LEVEL:
            self._shift(level)
        self._fitted, self._fitted_count, self._fitted_at = self._solve(), self._count, now
        return self._fitted

    def _level(self) -> float:
        """How much longer the latest steps took than was expected, typically."""
        if not self._fitted_count:
            return 1.0
        base, row, new_token, context_token, _ = self._fitted
        expected = [base + row * step[1] + new_token * step[2] + context_token * step[3] for step in self._latest]
        return median(step[4] / (likely or step[4]) for step, likely in zip(self._latest, expected, strict=True))

    def _shift(self, level: float) -> None:
        """Bring all but the latest steps to another level."""
        first = self._count - LATEST
        for kind, steps in self._kinds.items():
            self._kinds[kind] = [step if step[0] >= first else (*step[:4], step[4] * level) for step in steps]

    def _solve(self) -> StepFit:
        steps = np.array([step for kind in self._kinds.values() for step in kind], dtype=np.float64)
        features = steps[:, 1:].copy()  # rows, new tokens, context, and 1
        features[:, 3] = 1.0
        features /= steps[:, 4:]  # errors are relative
        weights = np.maximum(np.exp2((steps[:, 0] - self._count) / HALF_LIFE), LEAST_WEIGHT)
        trust = np.ones(len(steps))
        tie = TIE * float(np.sqrt((weights * features[:, 0] ** 2).sum()))
        for _ in range(TURNS):
            found = _least_squares(features, weights * trust, tie)
            errors = np.abs(features @ found - 1.0)
            limit = FAR_OFF * max(LEAST_ERROR, _weighted_median(errors, weights))
            if not (errors > limit).any():
                break
            trust = np.where(errors > limit, (limit / np.maximum(errors, limit)) ** 2, 1.0)
        row, new_token, context_token, base = map(float, found)
        return StepFit(base, row, new_token, context_token, len(steps))


def _least_squares(features: FloatArray, weights: FloatArray, tie: float) -> FloatArray:
    """x ≥ 0 [4] that brings features @ x [m] closest to 1, and the first of them to 0 if that makes no difference.

    The problem is made as small as its unknowns first: this is solved every few seconds beside an engine at work."""
    root = np.sqrt(weights)[:, None]
    table = np.vstack([np.column_stack([features * root, root]), [[tie, 0.0, 0.0, 0.0, 0.0]]])
    small: FloatArray = np.asarray(np.linalg.qr(table, mode="r"))
    return solve_nonnegative(small[:, :4], small[:, 4])


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])
