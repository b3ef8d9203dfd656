"""Figures and verdicts, from measurements made up by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kllm.verification.judgement import compare, judge, judge_alone, perplexity
from kllm.verification.measurement import Measurement
from kllm.verification.variants import EXACT, ROUNDED

PLAIN = Measurement(
    logprobs=[[-1.0, -2.0], [-3.0, -2.0]],
    best=[[5, 6], [7, 8]],
    continuations=[[1, 2, 3, 4], [1, 2, 3, 4]],
    needles={"a": True, "b": True, "c": False, "d": False},
    structured={"x": True, "y": True},
    seconds={"perplexity": 1.25, "needles": 0.5},
)


def failures(measured: Measurement, limits) -> list[str]:
    checks = judge(compare(measured, PLAIN), compare(PLAIN, PLAIN), limits)
    return [check.name for check in checks if not check.passed]


def test_perplexity_is_of_all_tokens_and_not_a_mean_of_windows():
    assert perplexity([[-1.0], [-4.0, -4.0, -3.0]]) == pytest.approx(math.exp(3.0))
    assert perplexity([[-1e6]]) == math.inf


def test_plain_against_itself():
    figures = compare(PLAIN, PLAIN)
    assert figures.perplexity == pytest.approx(math.exp(2.0))
    assert (figures.perplexity_change, figures.nats, figures.agreement) == (0.0, 0.0, 1.0)
    assert (figures.equal_tokens, figures.needles, figures.structured) == (4.0, 0.5, 1.0)
    assert (figures.cached_nats, figures.seconds) == (None, 1.75)
    assert failures(PLAIN, EXACT) == []


def test_every_figure_is_measured_against_plain():
    measured = replace(
        PLAIN,
        logprobs=[[-1.0, -2.0], [-3.0, -2.4]],
        best=[[5, 6], [7, 9]],
        continuations=[[1, 2, 9, 4], [1, 2, 3, 4]],
        needles={"a": True, "b": False, "c": False, "d": False},
        structured={"x": True, "y": False},
    )
    figures = compare(measured, PLAIN)
    assert figures.perplexity_change == pytest.approx(math.exp(0.1) - 1)
    assert figures.nats == pytest.approx(0.1)
    assert (figures.agreement, figures.equal_tokens) == (0.75, 3.0)
    assert (figures.needles, figures.structured) == (0.25, 0.5)
    assert failures(measured, ROUNDED) == [
        "perplexity change",
        "greedy agreement",
        "needles lost",
        "valid structured output",
    ]


def test_a_better_perplexity_counts_as_a_change_too():
    assert failures(replace(PLAIN, logprobs=[[-1.0, -2.0], [-3.0, -1.9]]), EXACT) == ["perplexity change"]


def test_a_lossy_variant_with_plains_own_numbers_was_not_in_force():
    assert failures(PLAIN, ROUNDED) == ["log-probabilities changed"]
    assert failures(replace(PLAIN, logprobs=[[-1.0, -2.0], [-3.0, -2.0 - 1e-9]]), ROUNDED) == []


def test_prefix_caching_must_have_been_used_and_change_nothing():
    assert failures(replace(PLAIN, cached_nats=[0.0, 1e-6], cached_tokens=64), EXACT) == []
    assert failures(replace(PLAIN, cached_nats=[0.0], cached_tokens=0), EXACT) == ["tokens from the prefix cache"]
    assert failures(replace(PLAIN, cached_nats=[0.01], cached_tokens=64), EXACT) == ["change by the prefix cache"]


def test_a_variant_may_find_more_needles_than_plain():
    found = dict.fromkeys("abcd", True)
    assert failures(replace(PLAIN, needles=found), EXACT) == []


def test_not_a_number_passes_nothing():
    measured = replace(PLAIN, logprobs=[[-1.0, math.nan], [-3.0, -2.0]])
    assert "perplexity change" in failures(measured, EXACT)
    assert "log-probabilities changed" in failures(measured, ROUNDED)


def test_what_was_not_asked_is_not_judged():
    nothing = replace(PLAIN, needles={}, structured={})
    assert judge_alone(compare(nothing, nothing)) == []
    names = [check.name for check in judge(compare(nothing, nothing), compare(nothing, nothing), EXACT)]
    assert names == ["perplexity change", "greedy agreement"]
