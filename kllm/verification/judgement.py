"""A variant's measurement beside plain's: figures, and whether they are within the variant's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kllm.verification.measurement import Measurement
from kllm.verification.texts import flatten
from kllm.verification.variants import Limits


@dataclass(frozen=True)
class Figures:
    """perplexity: of all scored tokens. equal_tokens: mean length of the greedy continuations' equal start.
    needles, structured: shares that succeeded, None where nothing was asked. nats: mean absolute change of a token's
    log-probability. cached_nats: see Limits. Changes and shares are relative to plain, perplexity_change signed."""

    perplexity: float
    perplexity_change: float
    agreement: float
    nats: float
    equal_tokens: float
    needles: float | None
    structured: float | None
    cached_nats: float | None
    cached_tokens: int
    seconds: float


@dataclass(frozen=True)
class Check:
    """value must be at most (or at least) limit."""

    name: str
    value: float
    relation: str
    limit: float

    @property
    def passed(self) -> bool:
        """A figure that is not a number passes nothing."""
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative log-probability (natural); infinite where it would overflow."""
    values = flatten(logprobs)
    try:
        return math.exp(-math.fsum(values) / len(values))
    except OverflowError:
        return math.inf


def compare(measured: Measurement, plain: Measurement) -> Figures:
    own, reference = flatten(measured.logprobs), flatten(plain.logprobs)
    base = perplexity(plain.logprobs)
    value = perplexity(measured.logprobs)
    pairs = list(zip(flatten(measured.best), flatten(plain.best), strict=True))
    starts = [_equal_start(a, b) for a, b in zip(measured.continuations, plain.continuations, strict=True)]
    return Figures(
        perplexity=value,
        perplexity_change=value / base - 1,
        agreement=sum(a == b for a, b in pairs) / len(pairs),
        nats=_mean([abs(a - b) for a, b in zip(own, reference, strict=True)]),
        equal_tokens=_mean(starts),
        needles=_share(list(measured.needles.values())),
        structured=_share(list(measured.structured.values())),
        cached_nats=_mean(measured.cached_nats) if measured.cached_nats is not None else None,
        cached_tokens=measured.cached_tokens,
        seconds=round(sum(measured.seconds.values()), 2),
    )


def judge(figures: Figures, plain: Figures, limits: Limits) -> list[Check]:
    checks = [
        Check("perplexity change", abs(figures.perplexity_change), "<=", limits.perplexity),
        Check("greedy agreement", figures.agreement, ">=", limits.agreement),
    ]
    if limits.lossy:  # the smallest positive number: any difference at all
        checks.append(Check("log-probabilities changed", figures.nats, ">=", math.ulp(0.0)))
    if figures.needles is not None and plain.needles is not None:
        checks.append(Check("needles lost", plain.needles - figures.needles, "<=", limits.needles))
    if figures.cached_nats is not None:
        checks.append(Check("tokens from the prefix cache", figures.cached_tokens, ">=", 1))
        checks.append(Check("change by the prefix cache", figures.cached_nats, "<=", limits.cached_nats))
    return checks + judge_alone(figures)


def judge_alone(figures: Figures) -> list[Check]:
    """What needs no comparison: structured output keeps to its schema, whatever computes it."""
    if figures.structured is None:
        return []
    return [Check("valid structured output", figures.structured, ">=", 1.0)]


def _equal_start(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
