"""The bundled traces: they read, they keep their sharing and their times, whatever the scale."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kllm.benchmark.arrivals import poisson_arrivals
from kllm.benchmark.config import TRACES
from kllm.benchmark.dataset import TokenSource
from kllm.benchmark.traces import TraceError, TraceRow, read_trace, trace_samples


@pytest.fixture
def source() -> TokenSource:
    return TokenSource(0, 32000)


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_gives_samples_of_the_recorded_lengths(name, source):
    rows = read_trace(name, 40)
    samples = trace_samples(rows, source, scale=1.0, speed_up=1.0)
    assert len(samples) == 40
    assert [len(s.prompt_token_ids) for s in samples] == [row.input_len for row in rows]
    assert [s.output_len for s in samples] == [row.output_len for row in rows]


@pytest.mark.parametrize(
    ("name", "rows", "mean_input"),
    [("mooncake-conversation", 12031, 12035), ("mooncake-synthetic", 3993, 15325), ("azure-code", 8819, 2048)]
    + [("azure-conv", 19366, 1155), ("weka-agentic", 18697, 117_700)],
)
def test_traces_are_the_documented_ones(name, rows, mean_input):
    trace = read_trace(name)
    assert len(trace) == rows
    assert sum(row.input_len for row in trace) / rows == pytest.approx(mean_input, rel=0.001)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.03])
def test_equal_block_ids_give_equal_tokens(scale, source):
    rows = read_trace("mooncake-conversation", 30)
    samples = trace_samples(rows, source, scale=scale, speed_up=1.0)
    per_block = round(512 * scale)
    tokens_of: dict[int, list[int]] = {}
    shared = 0
    for row, sample in zip(rows, samples, strict=True):
        for position, block in enumerate(row.block_ids):
            tokens = sample.prompt_token_ids[position * per_block : (position + 1) * per_block]
            if len(tokens) == per_block:
                shared += block in tokens_of
                assert tokens_of.setdefault(block, tokens) == tokens
    assert shared >= 25  # nearly all of these conversations start with block 0
    assert len({tuple(tokens) for tokens in tokens_of.values()}) == len(tokens_of)


def test_lengths_and_times_scale(source):
    rows = read_trace("azure-conv", 200)
    samples = trace_samples(rows, source, scale=0.1, speed_up=4.0)
    for row, sample in zip(rows, samples, strict=True):
        assert len(sample.prompt_token_ids) == max(1, round(row.input_len * 0.1))
        assert sample.output_len == max(1, round(row.output_len * 0.1))
        assert sample.arrival_s == pytest.approx(row.arrival_s / 4)
    assert samples[0].arrival_s == 0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(samples))


def test_turns_of_a_conversation_follow_each_other(source):
    rows = [
        TraceRow(0, 10, 1, (0,), "a"),
        TraceRow(0, 10, 1, (9,), "b"),
        TraceRow(5, 20, 1, (0, 1), "a", gap_s=2.0),
        TraceRow(30, 20, 1, (0, 2), "a/sub", parent="a"),
        TraceRow(8, 30, 1, (0, 1, 3), "a", gap_s=3.0),
    ]
    starts = iter([1.0, 2.0])
    samples = trace_samples(rows, source, 1.0, speed_up=2.0, session_starts_s=starts)
    assert [(s.arrival_s, s.after) for s in samples] == [(1.0, None), (2.0, None), (1.0, 0), (16.0, None), (1.5, 2)]


def test_conversations_share_their_own_prefix(source):
    rows = read_trace("weka-agentic", 5)
    samples = trace_samples(rows, source, scale=0.01, speed_up=1.0)
    per_block = round(512 * 0.01)
    for (row, sample), (_, following) in pairwise(zip(rows, samples, strict=True)):
        whole = len(row.block_ids) * per_block
        assert sample.prompt_token_ids[:whole] == following.prompt_token_ids[: min(whole, len(sample.prompt_token_ids))]


def test_a_missing_or_wrong_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"azure2023_code\.csv does not exist"):
        read_trace("azure-code", folder=tmp_path)
    (tmp_path / "mooncake_synthetic.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match=r"mooncake_synthetic\.jsonl is not a mooncake-synthetic trace"):
        read_trace("mooncake-synthetic", folder=tmp_path)


def test_poisson_arrivals_have_exponential_gaps():
    arrivals = poisson_arrivals(50.0, seed=1)
    times = [next(arrivals) for _ in range(20_000)]
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)
    again = poisson_arrivals(50.0, seed=1)
    assert [next(again) for _ in range(100)] == times[:100]


def test_an_infinite_rate_sends_all_at_once():
    arrivals = poisson_arrivals(float("inf"), seed=1)
    assert [next(arrivals) for _ in range(5)] == [0.0] * 5
