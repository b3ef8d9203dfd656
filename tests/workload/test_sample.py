"""Samples hold keys, and a source makes the same tokens of them on every machine, quickly."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.workload.sample import BLOCK, LONGEST_CACHED_RUN, Sample, TokenSource, _hashed, _mixed, fitting


def test_equal_keys_give_equal_tokens_in_any_order():
    first, second = TokenSource(7, 32000), TokenSource(7, 32000)
    expected = {key: first.take(50, key) for key in range(20)}
    for key in reversed(range(20)):
        assert second.take(50, key) == expected[key]
    assert len({tuple(tokens) for tokens in expected.values()}) == 20


def test_the_order_of_a_keys_numbers_matters():
    source = TokenSource(0, 32000)
    runs = [source.take(50, *key) for key in [(1, 2), (2, 1), (1,), (2,), (1, 2, 0), (0, 1, 2), (3,), ()]]
    assert len({tuple(run) for run in runs}) == len(runs)


def test_a_longer_run_starts_with_the_shorter_one():
    source = TokenSource(1, 1000)
    short = source.take(100, 3)
    assert source.take(512, 3)[:100] == short
    assert source.take(100, 3) == short
    assert source.take(0, 3) == []


def test_another_seed_gives_other_tokens():
    assert TokenSource(1, 32000).take(50, 0) != TokenSource(2, 32000).take(50, 0)


@pytest.mark.parametrize("vocab_size", [2, 300, 512, 513, 49152, 1_000_000])
def test_tokens_are_inside_the_vocabulary_and_all_over_it(vocab_size):
    tokens = TokenSource(0, vocab_size).take(20_000, 0)
    lowest = 256 if vocab_size > 512 else 0
    assert lowest <= min(tokens) <= max(tokens) < vocab_size
    assert {type(token) for token in tokens} == {int}
    for quarter in range(4):
        low = lowest + (vocab_size - lowest) * quarter / 4
        high = lowest + (vocab_size - lowest) * (quarter + 1) / 4
        if vocab_size >= 300:
            assert sum(low <= token < high for token in tokens) / 20_000 == pytest.approx(0.25, abs=0.02)


parts = st.lists(st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 5)), st.integers(0, 40)), max_size=8)


@given(st.lists(parts, max_size=6), st.integers(0, 5))
def test_a_prompt_is_its_runs_one_after_the_other(prompts, cache_runs):
    source = TokenSource(3, 5000, cache_runs)
    for prompt in prompts:
        sample = Sample(tuple(prompt), 1)
        expected = [token for key, length in prompt for token in TokenSource(3, 5000).take(length, *key)]
        assert source.prompt(sample) == expected
        assert sample.input_len == len(expected)


def test_changing_a_prompt_changes_no_other():
    source = TokenSource(0, 32000)
    sample = Sample((((BLOCK, 1), 20),), 1)
    expected = list(source.prompt(sample))
    source.prompt(sample)[:] = []
    assert source.prompt(sample) == expected


def test_only_so_many_runs_are_kept_the_least_recently_used_out_first():
    source = TokenSource(0, 32000, cache_runs=3)
    for block in (1, 2, 3, 1, 4):
        source.take(10, BLOCK, block)
    source.take(LONGEST_CACHED_RUN + 1, BLOCK, 5)
    assert list(source._runs) == [(BLOCK, 3), (BLOCK, 1), (BLOCK, 4)]


def test_tokens_do_not_depend_on_machine_or_process():
    expected = "[27580, 18935, 11799, 738, 21841, 19423] [0, 0, 0, 0, 1, 1]"
    code = (
        "from kllm.workload.sample import TokenSource as S; "
        "print(S(0, 32000).take(6, 2, 12345), S(2**80, 2).take(6, 2, -1))"
    )
    for hash_seed in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == expected


def test_the_hash_is_splitmix64():
    """The first numbers of the stream that starts at 1234567, as published with the algorithm's implementations."""
    numbers = _hashed(np.full(3, 1234567, dtype=np.uint64), np.arange(1, 4, dtype=np.uint64))
    assert numbers.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert _mixed(1234567) == 6457827717110365317


def test_a_long_prompt_is_made_quickly():
    """12,000 tokens of blocks not seen before: 0.3 ms on one core; the median of many, for the machine is shared."""
    source = TokenSource(0, 150_000)
    samples = [Sample(tuple(((BLOCK, i * 24 + j), 500) for j in range(24)), 1) for i in range(60)]
    seconds = []
    for sample in samples:
        start = time.perf_counter()
        source.prompt(sample)
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[30] < 0.002


def test_fitting_drops_what_is_too_long_and_what_follows_it():
    samples = [
        Sample((((1,), 90),), 20),
        Sample((((2,), 50),), 20),
        Sample((((3,), 10),), 20, after=0),
        Sample((((4,), 10),), 20, after=1),
        Sample((((5,), 10),), 20, after=3),
    ]
    kept = fitting(samples, 100)
    assert [(s.parts[0][0][0], s.after) for s in kept] == [(2, None), (4, 0), (5, 1)]
    assert fitting(samples, None) == samples
