"""At which rate of requests a fleet is saturated: the greatest for which a steady state exists.

In a steady state at r requests a second an instance's step of T seconds holds r·O·T decoding rows (Little's law: each
of r·O tokens a second takes one row of one step) and r·P·T prompt tokens, O being output tokens and P uncached prompt
tokens of a request. T follows from the step-time model, and grows with what the step holds: the steady state is the
fixed point, reached from below. There is none beyond saturation: places, KV or the token budget run out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kllm.costs.step import StepTimeModel, StepWork, selected_tokens

_ITERATIONS = 500
_PRECISION = 1e-4


@dataclass(frozen=True)
class MeanRequest:
    """What a request of the load is on average, in tokens. cached: of the input, found in the prefix cache."""

    input: float
    cached: float
    output: float


@dataclass(frozen=True)
class InstanceLimits:
    """kv_tokens: that fit into the KV cache. tokens_per_step, rows: of one step."""

    kv_tokens: int
    tokens_per_step: int
    rows: int
    top_k: int | None = None


def saturation_rate(request: MeanRequest, limits: InstanceLimits, times: StepTimeModel) -> float:
    """Requests a second that one instance can serve, to a ten-thousandth."""
    low, high = 0.0, 1e-3
    while _steady(high, request, limits, times):
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        rate = (low + high) / 2
        if _steady(rate, request, limits, times):
            low = rate
        else:
            high = rate
    return low


def pools_saturation_rate(
    request: MeanRequest, prefill: int, decode: int, limits: InstanceLimits, times: StepTimeModel
) -> float:
    """Requests a second that so many P's and D's can serve: what the side that has too little of it can. A P computes
    prompts and one token of each; a D has the prompts' KV brought to it."""
    prefilled = saturation_rate(MeanRequest(request.input, request.cached, 1.0), limits, times)
    decoded = saturation_rate(MeanRequest(request.input, request.input, request.output), limits, times)
    return min(prefill * prefilled, decode * decoded)


def _steady(rate: float, request: MeanRequest, limits: InstanceLimits, times: StepTimeModel) -> bool:
    context = request.input + request.output / 2
    uncached = request.input - request.cached
    seconds = 0.0
    for _ in range(_ITERATIONS):
        rows = rate * request.output * seconds
        tokens = rate * uncached * seconds
        if rows > limits.rows or rows + tokens > limits.tokens_per_step or rows * context > limits.kv_tokens:
            return False
        before, seconds = seconds, times.seconds(_work(rows, tokens, context, request, limits.top_k))
        if seconds - before < 1e-6 * seconds:
            return True
    return False


def _work(rows: float, tokens: float, context: float, request: MeanRequest, top_k: int | None) -> StepWork:
    """A step that holds these decoding rows and prompt tokens, as whole numbers."""
    attended = rows * context + tokens * (request.input + request.cached) / 2
    selected = attended
    if top_k is not None:
        first, count = round(request.cached), max(1, round(request.input - request.cached))
        selected = rows * min(context, top_k) + tokens * selected_tokens(first, count, top_k) / count
    return StepWork(
        rows=max(1, round(rows)) + (tokens > 0),
        new_tokens=max(1, round(rows + tokens)),
        sampled=max(1, round(rows)),
        context=round(rows * context + (request.input if tokens > 0 else 0)),
        attended=round(attended),
        selected=round(selected),
        longest=max(1, round(min(tokens, request.input - request.cached))),
    )
