"""A line that is wrong in one way gives an error that names file, line and field, whatever surrounds it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.workload.trace_readers import READERS, TraceFormat
from kllm.workload.traces import TraceError, read_trace

not_a_count = st.sampled_from([None, True, "7", "", 1.5, -1, -(10**30), 10**9, 10**30, 1e300, [], [3], {}, {"a": 1}])
MOONCAKE_FIELDS = ["timestamp", "input_length", "output_length", "hash_ids"]
WEKA_FIELDS = ["session_id", "turn", "t_ms", "gap_ms", "input_length", "output_length", "hash_runs"]
HEADER = {"schema": "agentic_mooncake_512", "block_size": 512}


@st.composite
def mooncake_rows(draw) -> list[dict[str, Any]]:
    """A valid trace of one to five rows, each with ids of its own after a shared first one."""
    rows: list[dict[str, Any]] = []
    time, fresh = draw(st.integers(0, 10)), 1
    for _ in range(draw(st.integers(1, 5))):
        time += draw(st.sampled_from([0, 0, 1, 3000]))
        length = draw(st.integers(1, 3000))
        count = draw(st.sampled_from([length // 512, -(-length // 512)]))
        ids = [0, *range(fresh, fresh + count - 1)] if count else []
        fresh += count
        rows.append({"timestamp": time, "input_length": length, "output_length": 1 + length % 7, "hash_ids": ids})
    return rows


@st.composite
def weka_rows(draw) -> list[dict[str, Any]]:
    """A valid trace of two sessions whose turns alternate, the second a sub-agent of the first."""
    rows = []
    for turn in range(draw(st.integers(1, 4))):
        for session in ("a", "a/sub"):
            blocks = draw(st.integers(1, 9))
            row = {"session_id": session, "turn": turn, "t_ms": turn * 1000, "gap_ms": 5 if turn else None}
            row |= {"input_length": 512 * blocks + 3, "output_length": turn, "hash_runs": [[0, 1], [7, blocks - 1]]}
            if blocks == 1:
                row["hash_runs"] = [[0, 1]]
            rows.append(row | ({"parent_session_id": "a"} if session == "a/sub" else {}))
    return rows


def read(tmp_path_factory, lines: list[str]) -> Any:
    path = tmp_path_factory.getbasetemp() / "trace"
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_trace(path)


def expect(tmp_path_factory, lines: list[str], line: int, *fields: str | None) -> str:
    with pytest.raises(TraceError) as caught:
        read(tmp_path_factory, lines)
    error = caught.value
    assert error.line == line, error
    assert error.field in fields, error
    assert f"trace, line {line}, field {error.field}: " in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 500
    return error.problem


@given(mooncake_rows())
def test_valid_mooncake_traces_are_read(tmp_path_factory, rows):
    read_rows = read(tmp_path_factory, list(map(json.dumps, rows)))
    assert [row.input_len for row in read_rows] == [row["input_length"] for row in rows]
    assert [list(row.block_ids()) for row in read_rows] == [row["hash_ids"] for row in rows]
    assert [row.arrival_s for row in read_rows] == [(row["timestamp"] - rows[0]["timestamp"]) / 1e3 for row in rows]


@given(weka_rows())
def test_valid_weka_traces_are_read(tmp_path_factory, rows):
    read_rows = read(tmp_path_factory, list(map(json.dumps, [HEADER, *rows])))
    assert [(row.session, row.arrival_s) for row in read_rows] == [
        (row["session_id"], row["t_ms"] / 1e3) for row in rows
    ]
    assert [len(list(row.block_ids())) for row in read_rows] == [row["input_length"] // 512 for row in rows]


@given(mooncake_rows(), st.data())
def test_a_missing_field(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(MOONCAKE_FIELDS))
    del rows[index][field]
    assert "missing" in expect(tmp_path_factory, list(map(json.dumps, rows)), index + 1, field)


@given(mooncake_rows(), st.data())
def test_a_value_of_a_wrong_type_or_size(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(MOONCAKE_FIELDS))
    values = not_a_count.filter(lambda value: field != "hash_ids" or not isinstance(value, list))
    values = values.filter(lambda value: field != "timestamp" or value != 10**9)  # that is a time: eleven days
    rows[index][field] = data.draw(values)
    expect(tmp_path_factory, list(map(json.dumps, rows)), index + 1, field)


@given(mooncake_rows(), st.data())
def test_a_length_of_zero(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(["input_length", "output_length"]))
    rows[index][field] = 0
    expect(tmp_path_factory, list(map(json.dumps, rows)), index + 1, field)


@given(mooncake_rows(), st.data())
def test_a_time_before_the_row_before(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    rows.insert(index + 1, rows[index] | {"timestamp": rows[index]["timestamp"] + 5})
    rows.insert(index + 2, rows[index])
    assert "earlier" in expect(tmp_path_factory, list(map(json.dumps, rows)), index + 3, "timestamp")


@given(mooncake_rows(), st.data())
def test_wrong_ids(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    row = rows[index]
    ids = row["hash_ids"]
    kinds = ["too many", "not a number"]
    if len(ids) > 1:
        kinds += ["twice", "too few", "negative", "huge"]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "too many":
        row["hash_ids"] = ids + [10**6, 10**6 + 1]
    elif kind == "too few":
        row["hash_ids"] = ids[: (row["input_length"] // 512) - 1]
    else:
        wrong = {"twice": ids[:1], "negative": [-4], "huge": [1 << 63], "not a number": ["a"]}[kind]
        row["hash_ids"] = ids[:-1] + wrong
    expect(tmp_path_factory, list(map(json.dumps, rows)), index + 1, "hash_ids")


def test_an_id_that_follows_another_than_before(tmp_path_factory):
    rows = [
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": ids} for ids in ([0, 1, 2], [0, 2, 3])
    ]
    problem = expect(tmp_path_factory, list(map(json.dumps, rows)), 2, "hash_ids")
    assert problem == "id 2 comes after 0, in an earlier row after 1"
    rows[1]["hash_ids"] = [1, 3, 4]
    assert "id 1 comes first, in an earlier row after 0" in expect(
        tmp_path_factory, list(map(json.dumps, rows)), 2, "hash_ids"
    )


def test_mooncake_rows_may_be_equal(tmp_path_factory):
    line = json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [4]})
    assert len(read(tmp_path_factory, [line] * 3)) == 3


@given(weka_rows(), st.data())
def test_a_missing_or_wrong_field_of_a_session(tmp_path_factory, rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(WEKA_FIELDS))
    if data.draw(st.booleans()):
        del rows[index][field]
    else:
        values = {
            "session_id": st.sampled_from([None, "", 3, [], "x" * 201]),
            "hash_runs": st.sampled_from([None, 3, "", {}, [3], [[0]], [[0, 1, 2]], [[-1, 5]], [[0, 0]], [[0, -3]]]),
            "gap_ms": not_a_count.filter(lambda value: value is not None),
        }
        value = data.draw(values.get(field, not_a_count))
        if (field, value) in [("turn", 10**9), ("t_ms", 10**9), ("gap_ms", 10**9)]:
            value = -value
        rows[index][field] = value
    expect(tmp_path_factory, list(map(json.dumps, [HEADER, *rows])), index + 2, field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"turn": 0}, "turn"),
        ({"t_ms": 0}, "t_ms"),
        ({"gap_ms": None}, "gap_ms"),
        ({"session_id": "b", "turn": 0}, "gap_ms"),
        ({"session_id": "b", "gap_ms": None, "parent_session_id": "nobody"}, "parent_session_id"),
        ({"session_id": "b", "gap_ms": None, "parent_session_id": "b"}, "parent_session_id"),
        ({"parent_session_id": "a"}, "parent_session_id"),
        ({"parent_session_id": 3}, "parent_session_id"),
        ({"hash_runs": [[0, 2], [1, 1]]}, "hash_runs"),
        ({"hash_runs": [[0, 1]]}, "hash_runs"),
        ({"hash_runs": [[0, 4]]}, "hash_runs"),
        ({"hash_runs": [[0, 10_000_000]] * 50_000}, "hash_runs"),
        ({"hash_runs": [[(1 << 63) - 1, 3]]}, "hash_runs"),
    ],
)
def test_sessions_that_make_no_sense(changes, field, tmp_path_factory):
    row = {"session_id": "a", "turn": 0, "t_ms": 0, "gap_ms": None, "input_length": 1536, "output_length": 0}
    row["hash_runs"] = [[0, 3]]
    second = row | {"turn": 1, "t_ms": 10, "gap_ms": 3}
    assert len(read(tmp_path_factory, list(map(json.dumps, [HEADER, row, second])))) == 2
    expect(tmp_path_factory, list(map(json.dumps, [HEADER, row, second | changes])), 3, field)


@pytest.mark.parametrize("header", [{"block_size": 64}, {"block_size": "512"}, {"block_size": None}])
def test_a_session_header_of_other_blocks(header, tmp_path_factory):
    expect(tmp_path_factory, [json.dumps(header)], 1, "block_size")


def test_sessions_without_a_header(tmp_path_factory):
    expect(tmp_path_factory, [json.dumps({"session_id": "a", "turn": 0})], 1, "block_size")


AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("2023-11-16 18:17:03.9799599,10,10", "TIMESTAMP"),
        ("2023-11-16 18:17:03.9799600,4808,10", "TIMESTAMP"),
        ("yesterday,10,10", "TIMESTAMP"),
        (",10,10", "TIMESTAMP"),
        ("2023-11-16 18:17:05+00:00,10,10", "TIMESTAMP"),
        ("2043-11-16 18:17:05,10,10", "TIMESTAMP"),
        ("2023-11-16 18:17:05,,10", "ContextTokens"),
        ("2023-11-16 18:17:05,-5,10", "ContextTokens"),
        ("2023-11-16 18:17:05,0,10", "ContextTokens"),
        ("2023-11-16 18:17:05,1e3,10", "ContextTokens"),
        ("2023-11-16 18:17:05,1_000,10", "ContextTokens"),
        ("2023-11-16 18:17:05,٣,10", "ContextTokens"),
        ("2023-11-16 18:17:05,10,0", "GeneratedTokens"),
        ("2023-11-16 18:17:05,10,nan", "GeneratedTokens"),
        ("2023-11-16 18:17:05,10," + "9" * 5000, "GeneratedTokens"),
        ("2023-11-16 18:17:05,10,10000001", "GeneratedTokens"),
        ("2023-11-16 18:17:05,10", "GeneratedTokens"),
        ("2023-11-16 18:17:05,10,10,10", "GeneratedTokens"),
    ],
)
def test_wrong_azure_rows(line, field, tmp_path_factory):
    expect(tmp_path_factory, [*AZURE, line], 3, field)


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), max_size=40))
def test_any_text_as_an_azure_row_is_read_or_refused(tmp_path_factory, text):
    with pytest.raises(TraceError) as caught:
        read(tmp_path_factory, [*AZURE, text, "no row at all"])
    assert caught.value.line in (3, 4)


def test_azure_requests_may_come_at_the_same_time(tmp_path_factory):
    rows = read(tmp_path_factory, [*AZURE, "2023-11-16 18:17:03.9799600,4808,11"])
    assert [row.arrival_s for row in rows] == [0.0, 0.0]


def test_azure_columns_are_found_by_name(tmp_path_factory):
    (row,) = read(tmp_path_factory, ["TIMESTAMP,Zone,GeneratedTokens,ContextTokens", "2023-11-16 18:17:03,x,10,4808"])
    assert (row.input_len, row.output_len) == (4808, 10)


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ("TIMESTAMP,ContextTokens", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens", "ContextTokens"),
        ("TIMESTAMPS,ContextTokens,GeneratedTokens", "TIMESTAMP"),
    ],
)
def test_azure_headers_without_a_column(header, field, tmp_path_factory):
    expect(tmp_path_factory, [header, "2023-11-16 18:17:03,1,1"], 1, field)


names = st.sampled_from([*WEKA_FIELDS, *MOONCAKE_FIELDS, "block_size"])
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
any_json = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=8))


@pytest.mark.parametrize("format", READERS)
@given(value=any_json)
def test_any_json_is_read_or_refused(tmp_path_factory, format: TraceFormat, value):
    path = tmp_path_factory.getbasetemp() / "trace"
    path.write_text(json.dumps(value))
    with suppress(TraceError):
        assert read_trace(path, format=format)
