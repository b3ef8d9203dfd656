from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.costs.nnls import FloatArray, solve_nonnegative


def brute_force(matrix: FloatArray, target: FloatArray) -> float:
    """The smallest residual of all choices of unknowns that may differ from 0."""
    best = float(np.linalg.norm(target))
    matrix = matrix / np.linalg.norm(matrix, axis=0)
    count = matrix.shape[1]
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = matrix[:, chosen]
            solution = np.linalg.lstsq(columns, target, rcond=None)[0]
            if (solution >= 0).all():
                best = min(best, float(np.linalg.norm(columns @ solution - target)))
    return best


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 12),
    columns=st.integers(1, 6),
    kind=st.sampled_from(["mixed", "positive", "dependent", "units"]),
)
def test_as_good_as_trying_every_active_set(seed, rows, columns, kind):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    if kind == "positive":
        matrix, target = np.abs(matrix), np.abs(target)
    if kind == "dependent":
        matrix[:, -1] = matrix[:, 0]
    if kind == "units":
        matrix *= 10.0 ** rng.integers(-9, 9, size=columns)
    solution = solve_nonnegative(matrix, target)
    assert (solution >= 0).all()
    residual = float(np.linalg.norm(matrix @ solution - target))
    assert residual == pytest.approx(brute_force(matrix, target), rel=1e-7, abs=1e-9 * float(np.linalg.norm(target)))


def test_exact_solutions_are_found():
    matrix = np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0], [3.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    wanted = np.array([2.0, 0.0, 7.0])
    assert solve_nonnegative(matrix, matrix @ wanted) == pytest.approx(wanted)


def test_what_only_negative_coefficients_could_explain_stays_0():
    assert solve_nonnegative(np.ones((3, 1)), -np.ones(3)) == pytest.approx([0.0])
    assert solve_nonnegative(np.zeros((3, 2)), np.ones(3)) == pytest.approx([0.0, 0.0])
