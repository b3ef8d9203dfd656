"""Pauses: which prompts those who decode at an instance can bear. Pure."""

from __future__ import annotations

from kllm.cluster.pool_prediction import CHUNK_TOKENS, ahead, decoding, lacking, step_seconds
from kllm.cluster.routing import Candidate
from kllm.messages import StepTimes

SPREAD = 64  # outputs of a request over which a pause counts: TPOT is a mean
LEAST_STEP_S = 1e-3  # of an instance whose few steps so far seem to take no time
REPORT_S = 1.0  # a report is at most so old, in steps that came before a prompt and are counted only after it


class Pauses:
    """A prompt holds up those who decode at the same instance. They bear one that

    - is so short that a step which computes it stays within the SLO; or
    - takes no longer than their steps have been below the SLO since the last such prompt, over SPREAD steps at most.

    So the mean of steps and pauses stays within the SLO, however many prompts come. Steps are counted by the reports:
    there is no clock here.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # by index: steps reported then, steps at the end of the pause

    def bears(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> bool:
        """With a request of so many tokens, of which it lacks some. slo_s: of a step."""
        slack = slo_s - step_seconds(candidate, times, tokens)
        return slack > 0 and (
            pause_seconds(candidate, times, tokens, slo_s) == 0.0
            or (ahead(candidate) + lacking(candidate, tokens)) * times.new_token <= slack * self._spread(candidate)
        )

    def taken(self, candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> None:
        """It has got that request."""
        if pause_seconds(candidate, times, tokens, slo_s) > 0.0:
            steps, step = candidate.load.steps, max(LEAST_STEP_S, step_seconds(candidate, times, tokens))
            self._last[candidate.index] = (steps, steps + REPORT_S / step)

    def _spread(self, candidate: Candidate) -> float:
        """Steps that the next pause may be weighed against."""
        before, after = self._last.get(candidate.index, (0, 0.0))
        steps = candidate.load.steps
        if decoding(candidate) == 0 or after == 0.0 or steps < before:  # nobody to bear it, the first, or a new process
            return SPREAD
        return max(0.0, min(SPREAD, steps - after))


def pause_seconds(candidate: Candidate, times: StepTimes, tokens: int, slo_s: float) -> float:
    """How long it holds those who decode there up; 0.0 if it is so short that no step is beyond the SLO."""
    compute = lacking(candidate, tokens)
    in_a_step = min(ahead(candidate) + compute, candidate.chunk_tokens or CHUNK_TOKENS) * times.new_token
    short = in_a_step <= slo_s - step_seconds(candidate, times, tokens)
    return 0.0 if short else compute * times.new_token
