"""Traces as samples: lengths, times and sharing are those of the trace, whatever the scale."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kllm.workload.replay import describe_scaling, trace_samples
from kllm.workload.sample import TokenSource
from kllm.workload.traces import TRACES, TraceRow, read_trace


@pytest.fixture
def source() -> TokenSource:
    return TokenSource(0, 32000)


def common(a: list[int], b: list[int]) -> int:
    """Tokens that two prompts share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_gives_samples_of_the_recorded_lengths(name):
    rows = read_trace(name, limit_requests=300)
    samples = trace_samples(rows)
    assert [s.input_len for s in samples] == [row.input_len for row in rows]
    assert [s.output_len for s in samples] == [max(1, row.output_len) for row in rows]


@pytest.mark.parametrize(("name", "count"), [("mooncake-conversation", 20), ("weka-agentic", 6)])
def test_prompts_share_exactly_the_blocks_that_the_trace_says(name, count, source):
    rows = read_trace(name, limit_requests=count)
    samples = trace_samples(rows)
    made = [source.prompt(sample) for sample in samples]
    shared = 0
    for index, row in enumerate(rows):
        for earlier in range(index):
            ids, others = list(row.block_ids()), list(rows[earlier].block_ids())
            same = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)
            same = min(len(ids), len(others)) if same is None else same
            tokens = min(same * 512, row.input_len, rows[earlier].input_len)
            found = common(made[index], made[earlier])
            assert tokens <= found < tokens + 4  # tokens of different blocks are equal now and then
            shared += same
    assert shared > 10


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.03])
def test_equal_block_ids_give_equal_tokens(scale, source):
    rows = read_trace("mooncake-conversation", limit_requests=30)
    samples = trace_samples(rows, scale=scale)
    per_block = round(512 * scale)
    tokens_of: dict[int, list[int]] = {}
    shared = 0
    for row, sample in zip(rows, samples, strict=True):
        prompt = source.prompt(sample)
        for position, block in enumerate(row.block_ids()):
            tokens = prompt[position * per_block : (position + 1) * per_block]
            if len(tokens) == per_block:
                shared += block in tokens_of
                assert tokens_of.setdefault(block, tokens) == tokens
    assert shared >= 25  # nearly all of these conversations start with block 0
    assert len({tuple(tokens) for tokens in tokens_of.values()}) == len(tokens_of)


def test_rows_without_ids_share_nothing(source):
    rows = [TraceRow(0, 40, 1), TraceRow(0, 40, 1), TraceRow(0, 1000, 1, ((3, 1),)), TraceRow(0, 1000, 1, ((3, 1),))]
    first, second, third, fourth = (source.prompt(sample) for sample in trace_samples(rows))
    assert common(first, second) < 3
    assert 512 <= common(third, fourth) < 515


def test_lengths_and_times_scale():
    rows = read_trace("azure-conv", limit_requests=200)
    samples = trace_samples(rows, scale=0.1, speed_up=4.0)
    for row, sample in zip(rows, samples, strict=True):
        assert sample.input_len == max(1, round(row.input_len * 0.1))
        assert sample.output_len == max(1, round(row.output_len * 0.1))
        assert sample.arrival_s == pytest.approx(row.arrival_s / 4)
    assert samples[0].arrival_s == 0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(samples))


def test_turns_of_a_conversation_follow_each_other():
    rows = [
        TraceRow(0, 10, 1, ((0, 1),), "a"),
        TraceRow(0, 10, 1, ((9, 1),), "b"),
        TraceRow(5, 20, 1, ((0, 2),), "a", gap_s=2.0),
        TraceRow(30, 20, 1, ((0, 1), (2, 1)), "a/sub", parent="a"),
        TraceRow(8, 30, 1, ((0, 2), (3, 1)), "a", gap_s=3.0),
    ]
    samples = trace_samples(rows, speed_up=2.0, session_starts_s=iter([1.0, 2.0]))
    assert [(s.arrival_s, s.after) for s in samples] == [(1.0, None), (2.0, None), (1.0, 0), (16.0, None), (1.5, 2)]


def test_conversations_share_their_own_prefix(source):
    rows = read_trace("weka-agentic", limit_requests=5)
    samples = trace_samples(rows, scale=0.01)
    per_block = round(512 * 0.01)
    for (row, sample), (_, following) in pairwise(zip(rows, samples, strict=True)):
        whole = min(len(list(row.block_ids())) * per_block, sample.input_len)
        assert source.prompt(sample)[:whole] == source.prompt(following)[:whole]


def test_a_trace_of_long_prompts_stays_small():
    """Equal blocks are one object, so that 28 million tokens of prompts are some thousand parts."""
    samples = trace_samples(read_trace("weka-agentic", limit_requests=300))
    assert sum(sample.input_len for sample in samples) > 25e6
    assert len({id(part) for sample in samples for part in sample.parts}) < 10_000


@pytest.mark.parametrize(
    ("scale", "speed_up", "sentences"),
    [
        (1.0, 1.0, []),
        (0.25, 1.0, ["lengths are 1/4 of the trace's"]),
        (0.1, 2.0, ["lengths are 1/10 of the trace's", "times between requests are 1/2 of the trace's"]),
        (2.0, 1 / 3, ["lengths are 2 times the trace's", "times between requests are 3 times the trace's"]),
        (0.37, 0.8, ["lengths are 0.37 times the trace's", "times between requests are 1.25 times the trace's"]),
        (1.0, 123.4, ["times between requests are 0.008104 times the trace's"]),
    ],
)
def test_scaling_is_told_in_sentences(scale, speed_up, sentences):
    assert describe_scaling(scale, speed_up) == sentences
