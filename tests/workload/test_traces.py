"""Traces by name and by path: their documented figures, limits, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kllm.workload.trace_readers import LONGEST_LINE
from kllm.workload.traces import TRACE_DIR, TRACES, TraceError, TraceRow, read_trace, trace_statistics

# rows, rate, CV of gaps, ISL mean, ISL max, OSL mean, OSL max, reuse (%): the table of the traces' README
DOCUMENTED = {
    "mooncake-conversation": (12_031, 3.40, 3.03, 12_035, 126_195, 343, 2_000, 37.4),
    "mooncake-synthetic": (3_993, 3.91, 1.01, 15_325, 191_378, 149, 893, 65.1),
    "azure-code": (8_819, 2.57, 13.2, 2_048, 7_437, 28, 1_899, None),
    "azure-conv": (19_366, 5.53, 1.09, 1_155, 14_050, 211, 1_000, None),
    "weka-agentic": (18_697, None, None, 117_741, 878_882, 427, 16_681, 95.85),
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_documented_ones(name):
    rows, rate, cv, input_mean, input_max, output_mean, output_max, reuse = DOCUMENTED[name]
    figures = trace_statistics(read_trace(name))
    assert figures.requests == rows
    assert figures.requests_per_s == (None if rate is None else pytest.approx(rate, abs=0.005))
    assert figures.gap_cv == (None if cv is None else pytest.approx(cv, rel=0.005))
    assert (figures.input_max, figures.output_max) == (input_max, output_max)
    assert figures.input_mean == pytest.approx(input_mean, abs=0.6)
    assert figures.output_mean == pytest.approx(output_mean, abs=0.6)
    assert figures.prefix_reuse == (None if reuse is None else pytest.approx(reuse / 100, abs=0.0005))
    assert figures.sessions == (320 if name == "weka-agentic" else None)


def test_statistics_by_hand():
    rows = [
        TraceRow(0.0, 1000, 10, ((0, 2),)),
        TraceRow(1.0, 1500, 20, ((0, 1), (7, 2))),  # one block of 512 was there before
        TraceRow(4.0, 1000, 30, ((0, 2),)),  # all of it was
    ]
    figures = trace_statistics(rows)
    assert figures.prefix_reuse == (512 + 1000) / 3500
    assert (figures.span_s, figures.requests_per_s, figures.gap_cv) == (4.0, 0.75, 0.5)
    assert trace_statistics(rows[:1]).gap_cv is None
    with pytest.raises(ValueError, match="without rows"):
        trace_statistics([])


def test_a_file_is_recognised_by_its_first_line(tmp_path):
    for name, file in [("mooncake-synthetic", "mooncake_synthetic.jsonl"), ("azure-code", "azure2023_code.csv")] + [
        ("weka-agentic", "weka_agentic_512.jsonl")
    ]:
        copy = tmp_path / "renamed.txt"
        copy.write_bytes((TRACE_DIR / file).read_bytes())
        assert read_trace(copy, limit_requests=50) == read_trace(name, limit_requests=50)
        assert read_trace(str(copy), limit_requests=1) == read_trace(name, limit_requests=1)


def test_limits():
    whole = read_trace("mooncake-conversation")
    assert read_trace("mooncake-conversation", limit_requests=7) == whole[:7]
    part = read_trace("mooncake-conversation", limit_seconds=60)
    assert part == [row for row in whole if row.arrival_s < 60]
    assert read_trace("mooncake-conversation", limit_seconds=60, limit_requests=20) == whole[:20]
    sessions = read_trace("weka-agentic")
    assert read_trace("weka-agentic", limit_seconds=600) == [row for row in sessions if row.arrival_s < 600]


def test_times_count_from_the_first_request(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(mooncake(timestamp=time) for time in (5000, 5000, 6500)))
    assert [row.arrival_s for row in read_trace(path)] == [0.0, 0.0, 1.5]


def test_blank_lines_a_byte_order_mark_and_crlf_do_no_harm(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbf\r\nTIMESTAMP,ContextTokens,GeneratedTokens\r\n\r\n2023-11-16 18:17:03.9799600,4808,10\r\n\r\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 4808, 10)]


def mooncake(**changes) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changes)


def broken(path: Path, content: bytes, **options) -> TraceError:
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    assert str(path) in str(caught.value)
    assert caught.value.file == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b"", None, "holds no requests"),
        (b"\n\n", None, "holds no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", None, "holds no requests"),
        (b"hello\n", 1, "not the first line of a mooncake, azure, weka trace"),
        (b"[1, 2]\n", 1, "not the first line"),
        (b"{}\n", 1, "not the first line"),
        (b"[" * 100_000, 1, "not the first line"),
        (b"\x1f\x8b\x08\x00\xff\n", 1, r"not UTF-8 \(byte 2\)"),
        (mooncake().encode() + b'\n{"timestamp": \xff}\n', 2, "not UTF-8"),
        (mooncake().encode() + b"\n" + b"x" * (LONGEST_LINE + 1), 2, f"longer than {LONGEST_LINE} bytes"),
        (mooncake().encode() + b"\n{\n", 2, "not JSON"),
        (mooncake().encode() + b"\n\n" + mooncake().encode() + b" x\n", 3, "not JSON"),
        (mooncake().encode() + b'\n{"timestamp": ' + b"[" * 100_000, 2, "expected `int`"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_its_line(content, line, problem, tmp_path):
    error = broken(tmp_path / "trace", content)
    assert (error.line, error.field) in [(line, None), (line, "timestamp")]
    with pytest.raises(TraceError, match=problem):
        raise error


def test_a_format_that_was_asked_for_is_not_recognised_again(tmp_path):
    error = broken(tmp_path / "trace", mooncake().encode(), format="azure")
    assert (error.line, error.field) == (1, "TIMESTAMP")


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"azure2023_code\.csv: does not exist .*name their folder"):
        read_trace("azure-code", folder=tmp_path)
    with pytest.raises(TraceError, match=r"no-such-trace: does not exist \(known are mooncake-conversation, "):
        read_trace("no-such-trace")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_a_wrong_file_under_a_known_name_is_named(tmp_path):
    (tmp_path / "mooncake_synthetic.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match=r"mooncake_synthetic\.jsonl, line 1, field input_length: "):
        read_trace("mooncake-synthetic", folder=tmp_path)
