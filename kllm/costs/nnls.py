"""Non-negative least squares by active sets (Lawson and Hanson, 1974), for a handful of unknowns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def solve_nonnegative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """x ≥ 0 [n] that minimises |matrix @ x - target|, for matrix [m, n] and target [m].

    Columns are brought to length 1 first, so their units do not matter. Where columns depend on each other one of the
    minima is returned.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0.0] = 1.0
    columns = matrix / lengths
    gram, projected = columns.T @ columns, columns.T @ target
    tolerance = 1e-10 * max(float(np.linalg.norm(target)), np.finfo(float).tiny)
    count = matrix.shape[1]
    solution = np.zeros(count)
    free = np.zeros(count, dtype=bool)  # unknowns that may differ from 0
    refused = np.zeros(count, dtype=bool)  # rounding gave them a slope, but no way to go
    for _ in range(3 * count + 10):  # each turn frees one; more than is needed, against going in circles
        slope = np.where(free | refused, -np.inf, projected - gram @ solution)
        steepest = int(np.argmax(slope))
        if slope[steepest] <= tolerance:
            break
        free[steepest] = True
        _descend(columns, target, solution, free)
        if free[steepest]:
            refused[:] = False
        else:
            refused[steepest] = True
    answer: FloatArray = solution / lengths
    return answer


def _descend(columns: FloatArray, target: FloatArray, solution: FloatArray, free: npt.NDArray[np.bool_]) -> None:
    """Move `solution` to the best one of the free unknowns; those that reach 0 on the way stay there."""
    while free.any():
        best = np.zeros_like(solution)
        best[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        falling = np.flatnonzero(free & (best <= 0.0))
        if not falling.size:
            solution[:] = best
            return
        gaps = solution[falling] - best[falling]
        parts = np.divide(solution[falling], gaps, out=np.zeros_like(gaps), where=gaps > 0.0)
        first = int(np.argmin(parts))
        solution += parts[first] * (best - solution)
        solution[falling[first]] = 0.0
        np.maximum(solution, 0.0, out=solution)
        free &= solution > 0.0
