"""Samples: deterministic, of the lengths asked for, sharing what they should share."""

from __future__ import annotations

import pytest

from kllm.benchmark.dataset import Sample, TokenSource, fitting, random_samples, shared_prefix_samples


def test_equal_keys_give_equal_tokens_in_any_order():
    first, second = TokenSource(7, 32000), TokenSource(7, 32000)
    expected = {key: first.take(50, key) for key in range(20)}
    for key in reversed(range(20)):
        assert second.take(50, key) == expected[key]
    assert len({tuple(tokens) for tokens in expected.values()}) == 20


def test_a_longer_run_starts_with_the_shorter_one():
    source = TokenSource(1, 1000)
    assert source.take(512, 3)[:100] == source.take(100, 3)


def test_another_seed_gives_other_tokens():
    assert TokenSource(1, 32000).take(50, 0) != TokenSource(2, 32000).take(50, 0)


@pytest.mark.parametrize("vocab_size", [2, 300, 49152])
def test_tokens_are_inside_the_vocabulary(vocab_size):
    tokens = TokenSource(0, vocab_size).take(2000, 0)
    assert 0 <= min(tokens) <= max(tokens) < vocab_size


def test_random_samples_have_the_lengths_asked_for():
    samples = random_samples(20, 30, 40, TokenSource(0, 32000))
    assert {(len(s.prompt_token_ids), s.output_len) for s in samples} == {(30, 40)}
    assert len({tuple(s.prompt_token_ids) for s in samples}) == 20


def test_random_lengths_spread_around_the_mean():
    samples = random_samples(2000, 100, 10, TokenSource(0, 32000), spread=0.5, seed=3)
    lengths = [len(s.prompt_token_ids) for s in samples]
    assert min(lengths) == 50
    assert max(lengths) == 150
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.03)
    assert samples == random_samples(2000, 100, 10, TokenSource(0, 32000), spread=0.5, seed=3)


def test_shared_prefixes_take_turns():
    samples = shared_prefix_samples(9, 3, 16, 8, 4, TokenSource(0, 32000))
    heads = [tuple(s.prompt_token_ids[:16]) for s in samples]
    assert heads == heads[:3] * 3
    assert len(set(heads)) == 3
    assert len({tuple(s.prompt_token_ids[16:]) for s in samples}) == 9
    assert {len(s.prompt_token_ids) for s in samples} == {24}


def test_fitting_drops_what_is_too_long_and_what_follows_it():
    samples = [
        Sample([1] * 90, 20),
        Sample([2] * 50, 20),
        Sample([3] * 10, 20, after=0),
        Sample([4] * 10, 20, after=1),
        Sample([5] * 10, 20, after=3),
    ]
    kept = fitting(samples, 100)
    assert [(s.prompt_token_ids[0], s.after) for s in kept] == [(2, None), (4, 0), (5, 1)]
    assert fitting(samples, None) == samples
