"""Pauses: which prompts those who decode at an instance can bear. Pure."""

from __future__ import annotations

from kllm.cluster.pool_prediction import CHUNK_TOKENS, ahead, decoding, lacking, step_seconds
from kllm.cluster.routing import Candidate
from kllm.messages import StepTimes

SPREAD = 64  # outputs of a request over which a pause counts: TPOT is a mean
REPORT_S = 1.0  # a report is at most so old, in steps that came before a prompt and are counted only after it


class Pauses:
    """A prompt holds up those who decode at the same instance. They bear one that

    - is so short that a step which computes it stays within the SLO; or
    - takes no longer than their steps have been below the SLO since the last such prompt, over SPREAD steps at most.

    So the mean of steps and pauses stays within the SLO, however many prompts come. Steps are counted by the reports:
    there is no clock here.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # by index: at the end of the last pause

    def bears(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> bool:
        """With a request of so many tokens, of which it lacks some. slo_s: of a step."""
        slack = slo_s - step_seconds(candidate, times, tokens)
        if slack <= 0:
            return False
        if _in_a_step(candidate, times, tokens) <= slack:
            return True
        pause = (ahead(candidate) + lacking(candidate, tokens)) * times.new_token
        return pause <= slack * self._spread(candidate)

    def taken(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> None:
        """It has got that request."""
        step = step_seconds(candidate, times, tokens)
        if _in_a_step(candidate, times, tokens) > slo_s - step:
            self._steps[candidate.index] = candidate.load.steps + REPORT_S / step

    def _spread(self, candidate: Candidate) -> float:
        since = candidate.load.steps - self._steps.get(candidate.index, float("-inf"))
        another = candidate.load.steps + REPORT_S / LEAST_STEP_S < self._steps.get(candidate.index, 0.0)
        if decoding(candidate) == 0 or another:
            return SPREAD
        return max(0.0, min(SPREAD, since))


def _in_a_step(candidate: Candidate, times: StepTimes, tokens: int) -> float:
    """Seconds that it adds to the longest step."""
    compute = ahead(candidate) + lacking(candidate, tokens)
    return min(compute, candidate.chunk_tokens or CHUNK_TOKENS) * times.new_token
