"""What the simulation takes from the recordings of loads A and B, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation_accuracy.real import Run
from kllm.costs.fitted import FittedStepTime, StepRecord
from kllm.costs.fitting import fit_step_time
from kllm.costs.nnls import solve_nonnegative
from kllm.costs.step import StepWork
from kllm.engine.recording import RecordedStep
from kllm.simulation.executor import PlanningCost

LONGEST_IDLE_S = 0.05  # a process that was stopped that long did not plan


@dataclass(frozen=True)
class Calibration:
    """times, sigma: of steps and their noise. planning: between steps.
    path_s: of a request from its client to the instance and of its first token back."""

    times: FittedStepTime
    sigma: float
    planning: PlanningCost
    path_s: float


def calibrate(runs: Sequence[Run], hardware: str) -> Calibration:
    """Raises CostError if there are too few steps."""
    steps = [step for run in runs for step in run.steps]
    times = fit_step_time([StepRecord(step.work, step.seconds) for step in steps], hardware).unbiased()
    return Calibration(times, times.errors["all"].sigma, fit_planning(steps), fit_path(runs))


def fit_planning(steps: Sequence[RecordedStep]) -> PlanningCost:
    """A constant and a share for each row. Sums count, not medians: a simulated step must cost what a real one does on
    average, waits for a core included."""
    gaps = [(step.work.rows, step.idle_s) for step in steps if step.idle_s is not None and step.idle_s < LONGEST_IDLE_S]
    rows, idle = np.array(gaps, dtype=np.float64).T
    constant, row = solve_nonnegative(np.column_stack((np.ones_like(rows), rows)), idle)
    return PlanningCost(float(constant), float(row))


def fit_path(runs: Sequence[Run]) -> float:
    """Mean seconds that a client waits for its first token outside the instance."""
    requests = sum(len(run.seen.ttft_s) for run in runs)
    return sum(sum(run.seen.ttft_s) - run.inside_s * len(run.seen.ttft_s) for run in runs) / requests


def step_ratio(run: Run, calibration: Calibration) -> float:
    """Recorded step times of a run over what the model says of the same steps."""
    predicted = sum(calibration.times.seconds(step.work) for step in run.steps)
    return sum(step.seconds for step in run.steps) / predicted


class StepAndPlanning:
    """A StepTimeModel of whole steps: computing, and planning beside it."""

    def __init__(self, calibration: Calibration) -> None:
        self._times, self._planning = calibration.times, calibration.planning

    def seconds(self, work: StepWork) -> float:
        return self._times.seconds(work) + self._planning.step_s + self._planning.row_s * work.rows
