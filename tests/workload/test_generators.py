"""Made-up loads have the lengths asked for and share the tokens that they should share."""

from __future__ import annotations

import pytest

from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.generators import (
    long_short_samples,
    random_samples,
    session_samples,
    shared_prefix_samples,
    with_arrivals,
    within,
)
from kllm.workload.sample import Sample, TokenSource


def prompts(samples: list[Sample]) -> list[list[int]]:
    source = TokenSource(0, 32000)
    made = [source.prompt(sample) for sample in samples]
    assert [len(prompt) for prompt in made] == [sample.input_len for sample in samples]
    return made


def test_random_samples_have_the_lengths_asked_for():
    samples = random_samples(20, 30, 40)
    assert {(s.input_len, s.output_len) for s in samples} == {(30, 40)}
    assert len({tuple(prompt) for prompt in prompts(samples)}) == 20


def test_random_lengths_spread_around_the_mean():
    samples = random_samples(2000, 100, 10, spread=0.5, seed=3)
    lengths = [s.input_len for s in samples]
    assert min(lengths) == 50
    assert max(lengths) == 150
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.03)
    assert samples == random_samples(2000, 100, 10, spread=0.5, seed=3)
    assert samples != random_samples(2000, 100, 10, spread=0.5, seed=4)


def test_lengths_are_never_below_one():
    assert within(1, 0.9) == (1, 2)
    assert within(100, 0.25) == (75, 125)


def test_shared_prefixes_take_turns():
    samples = shared_prefix_samples(9, 3, 16, 8, 4)
    made = prompts(samples)
    heads = [tuple(prompt[:16]) for prompt in made]
    assert heads == heads[:3] * 3
    assert len(set(heads)) == 3
    assert len({tuple(prompt[16:]) for prompt in made}) == 9
    assert {s.input_len for s in samples} == {24}


def test_a_prefix_of_no_tokens_shares_nothing():
    samples = shared_prefix_samples(4, 1, 0, 8, 4)
    assert {s.input_len for s in samples} == {8}
    assert len({tuple(prompt) for prompt in prompts(samples)}) == 4


def test_long_and_short_prompts_mix_in_the_share_asked_for():
    samples = long_short_samples(5000, 0.2, short=(10, 20), long=(1000, 2000), output=(5, 9), seed=1)
    long = [s for s in samples if s.input_len >= 1000]
    short = [s for s in samples if s.input_len <= 20]
    assert len(long) + len(short) == 5000
    assert len(long) / 5000 == pytest.approx(0.2, abs=0.02)
    assert {s.input_len for s in short} == set(range(10, 21))
    assert {s.output_len for s in long} == {s.output_len for s in short} == set(range(5, 10))
    assert sum(s.input_len for s in long) / len(long) == pytest.approx(1500, rel=0.03)
    # Other shares change who is long and nothing else.
    none = long_short_samples(5000, 0.0, short=(10, 20), long=(1000, 2000), output=(5, 9), seed=1)
    assert [s.output_len for s in none] == [s.output_len for s in samples]
    assert max(s.input_len for s in none) == 20


def test_each_turn_continues_the_prompt_and_the_output_before_it():
    samples = session_samples(11, turns=4, input_len=50, growth=7, output_len=5, think_s=2.0)
    made = prompts(samples)
    assert [s.input_len for s in samples] == [50, 62, 74, 86] * 2 + [50, 62, 74]
    assert [s.after for s in samples] == [None, 0, 1, 2, None, 4, 5, 6, None, 8, 9]
    for index, sample in enumerate(samples):
        if sample.after is not None:
            assert made[index][: samples[sample.after].input_len] == made[sample.after]
    assert len({tuple(prompt[:16]) for prompt in made}) == 3


def test_think_times_are_exponential_with_their_mean():
    samples = session_samples(4000, turns=4, input_len=1, growth=1, output_len=1, think_s=2.0, seed=5)
    pauses = [s.arrival_s for s in samples if s.after is not None]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.05)
    assert sum(pause > 2.0 for pause in pauses) / len(pauses) == pytest.approx(0.368, abs=0.02)
    assert {s.arrival_s for s in session_samples(8, 4, 1, 1, 1, think_s=0.0)} == {0.0}


def test_arrival_times_go_to_what_does_not_wait_for_another():
    samples = session_samples(6, turns=3, input_len=5, growth=1, output_len=1, think_s=1.0)
    times = poisson_arrivals(2.0, seed=0)
    arrived = with_arrivals(samples, poisson_arrivals(2.0, seed=0))
    assert [s.arrival_s for s in arrived if s.after is None] == [next(times), next(times)]
    assert [s for s in arrived if s.after is not None] == [s for s in samples if s.after is not None]
