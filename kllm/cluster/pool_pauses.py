"""Pauses: which prompts those who decode at an instance can bear. Pure."""

from __future__ import annotations

from kllm.cluster.pool_prediction import CHUNK_TOKENS, ahead, decoding, lacking, step_seconds
from kllm.cluster.routing import Candidate
from kllm.messages import StepTimes

SPREAD = 48  # outputs of a request over which a pause counts: TPOT is a mean


class Pauses:
    """A prompt holds up those who decode at the same instance. They bear one that

    - is so short that a step which computes it stays within the SLO; or
    - takes no longer than what their steps since then have stayed below the SLO, less the pauses that they had; of
      SPREAD steps at most.

    So the mean of steps and pauses stays within the SLO, however many prompts come. Steps are counted by the reports:
    there is no clock here.
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, float]] = {}  # by index: steps at the last pause, seconds left after it

    def bears(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> bool:
        """With a request of so many tokens, of which it lacks some. slo_s: of a step."""
        slack = slo_s - step_seconds(candidate, times, tokens)
        pause = pause_seconds(candidate, times, tokens, slo_s)
        if slack <= 0 or pause == 0.0:
            return slack > 0
        queue = ahead(candidate) * times.new_token
        return pause <= self._seconds_left(candidate, slack) and queue + pause <= SPREAD * slack

    def taken(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> None:
        """It has got that request."""
        pause = pause_seconds(candidate, times, tokens, slo_s)
        if pause > 0.0:
            left = self._seconds_left(candidate, slo_s - step_seconds(candidate, times, tokens))
            self._left[candidate.index] = (candidate.load.steps, left - pause)

    def _seconds_left(self, candidate: Candidate, slack: float) -> float:
        most, steps = SPREAD * slack, candidate.load.steps
        before, left = self._left.get(candidate.index, (steps, most))
        if decoding(candidate) == 0 or steps < before:  # nobody has to bear it, or it is a new process
            return most
        return min(most, left + (steps - before) * slack)


def pause_seconds(candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> float:
    """How long it holds those who decode there up; 0.0 if it is so short that no step is beyond the SLO."""
    compute = lacking(candidate, tokens)
    in_a_step = min(ahead(candidate) + compute, candidate.chunk_tokens or CHUNK_TOKENS) * times.new_token
    short = in_a_step <= slo_s - step_seconds(candidate, times, tokens)
    return 0.0 if short else compute * times.new_token
