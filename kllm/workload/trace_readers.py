"""Readers of the trace formats: one line at a time, each judged before it is believed.

    mooncake   JSON lines     timestamp (ms), input_length, output_length, hash_ids
    azure      CSV            TIMESTAMP, ContextTokens, GeneratedTokens
    weka       JSON lines     a header; then session_id, turn, t_ms, gap_ms, input_length, output_length, hash_runs

Block ids name blocks of 512 prompt tokens: an id stands for its block and for all before it (a rolling prefix hash), so
the same id always follows the same id.

What is an error and what is not, judged by the real traces:

- One clock (mooncake, azure): a timestamp before the previous one is an error. Equal ones are not: Mooncake's are
  rounded to steps of up to three seconds, so nine of ten rows have the time of the row before.
- Equal rows: Mooncake's have no name and a rounded time, and the conversation trace really has two equal requests at
  one moment, so they are not an error. Azure's times have steps of 100 ns: a row equal to the one before is a line
  written twice, an error. In weka (session, turn) names a request: turns and times must rise within a session.
- An output length of 0 is an error, except in weka, which records requests that were cut off; they count as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise
from typing import Annotated, Literal, TypeVar

import msgspec

BLOCK_TOKENS = 512  # what one block id of these traces stands for
LONGEST_LINE = 1 << 20  # bytes; the longest real line has 3,000
MOST_TOKENS = 10_000_000  # of one prompt or output
LATEST_MS = 10 * 365 * 86400 * 1000
LARGEST_ID = (1 << 63) - 1

TraceFormat = Literal["mooncake", "azure", "weka"]


class TraceError(ValueError):
    """A trace cannot be used. The message names the file and, where known, line and field.

    file: its path. line: from 1, None when the file as a whole is meant. field: as the file spells it, or None.
    """

    def __init__(self, file: str, line: int | None, field: str | None, problem: str) -> None:
        where = file if line is None else f"{file}, line {line}"
        super().__init__(f"{where}: {problem}" if field is None else f"{where}, field {field}: {problem}")
        self.file, self.line, self.field, self.problem = file, line, field, problem


class RowError(ValueError):
    """What is wrong with one line: (field or None, problem). The reader of the file adds file and line."""

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field, self.problem = field, problem


@dataclass(frozen=True)
class TraceRow:
    """One request as recorded.

    arrival_s: seconds since the trace's first request; with sessions, since the start of the row's session.
    block_runs: (first id, count) of consecutive ids; see block_ids().
    session: None unless the trace has conversations; gap_s is then the pause after the session's previous request (None
    for its first). parent: the session that started this one, of a sub-agent.
    """

    arrival_s: float
    input_len: int
    output_len: int
    block_runs: tuple[tuple[int, int], ...] = ()
    session: str | None = None
    parent: str | None = None
    gap_s: float | None = None

    def block_ids(self) -> Iterator[int]:
        """Ids of the prompt's blocks in order; the last may stand for a part of a block, or be missing for one."""
        return chain.from_iterable(range(first, first + count) for first, count in self.block_runs)


def recognise(first_line: str) -> TraceFormat | None:
    """The format of a file that starts with this line; None if it is none of them."""
    if "TIMESTAMP" in first_line.split(",")[0].strip():
        return "azure"
    try:
        value = msgspec.json.decode(first_line)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if value.keys() & {"block_size", "session_id"}:
        return "weka"
    # One field that is not in other traces is enough: the reader then says which other one is missing.
    return "mooncake" if value.keys() & {"timestamp", "input_length", "hash_ids"} else None


# ---- Mooncake

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=LATEST_MS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]


class _MooncakeLine(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_Id]


class MooncakeReader:
    """Rows of the Mooncake project's traces: one clock in milliseconds, ids in one space for the whole file."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode
        self._first_ms: int | None = None
        self._last_ms = 0
        self._before: dict[int, int] = {}  # id -> the id before it, -1 at the start of a prompt

    def row(self, text: str) -> TraceRow:
        """Raises RowError."""
        line = _decoded(self._decode, text)
        if self._first_ms is None:
            self._first_ms = line.timestamp
        elif line.timestamp < self._last_ms:
            raise RowError("timestamp", f"{line.timestamp} is earlier than the row before ({self._last_ms})")
        self._last_ms = line.timestamp
        _check_count("hash_ids", len(line.hash_ids), line.input_length)
        self._check_order(line.hash_ids)
        arrival = (line.timestamp - self._first_ms) / 1e3
        return TraceRow(arrival, line.input_length, line.output_length, _as_runs(line.hash_ids))

    def _check_order(self, ids: list[int]) -> None:
        if len(set(ids)) != len(ids):
            raise RowError("hash_ids", "an id comes twice in one prompt")
        before = -1
        for id in ids:
            known = self._before.setdefault(id, before)
            if known != before:
                raise RowError("hash_ids", f"id {id} comes {_after(before)}, in an earlier row {_after(known)}")
            before = id


def _after(id: int) -> str:
    return "first" if id < 0 else f"after {id}"


def _as_runs(ids: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for id in ids:
        if runs and runs[-1][0] + runs[-1][1] == id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((id, 1))
    return tuple(runs)


# ---- Weka


class _WekaHeader(msgspec.Struct):
    block_size: int


class _WekaLine(msgspec.Struct):
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    turn: Annotated[int, msgspec.Meta(ge=0, le=10**9)]
    t_ms: _Milliseconds
    gap_ms: _Milliseconds | None
    input_length: _Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_runs: list[tuple[_Id, Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]]]
    parent_session_id: str | None = None


class WekaReader:
    """Rows of agentic sessions, each with a clock of its own; ids run-length coded."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_WekaLine).decode
        self._header_read = False
        self._last: dict[str, _WekaLine] = {}  # session -> its latest line

    def row(self, text: str) -> TraceRow | None:
        """None for the header. Raises RowError."""
        if not self._header_read:
            self._header_read = True
            header = _decoded(msgspec.json.Decoder(_WekaHeader).decode, text)
            if header.block_size != BLOCK_TOKENS:
                raise RowError("block_size", f"must be {BLOCK_TOKENS}, not {header.block_size}")
            return None
        line = _decoded(self._decode, text)
        self._check_session(line)
        self._last[line.session_id] = line
        _check_count("hash_runs", sum(count for _, count in line.hash_runs), line.input_length)
        _check_runs(line.hash_runs)
        return TraceRow(
            arrival_s=line.t_ms / 1e3,
            input_len=line.input_length,
            output_len=line.output_length,
            block_runs=tuple(line.hash_runs),
            session=line.session_id,
            parent=line.parent_session_id,
            gap_s=None if line.gap_ms is None else line.gap_ms / 1e3,
        )

    def _check_session(self, line: _WekaLine) -> None:
        last = self._last.get(line.session_id)
        if last is None:
            if line.gap_ms is not None:
                raise RowError("gap_ms", "must be null in the first request of a session")
            if line.parent_session_id is not None and line.parent_session_id not in self._last:
                raise RowError("parent_session_id", f"no earlier row has the session {line.parent_session_id!r}")
            return
        if line.turn <= last.turn:
            raise RowError("turn", f"{line.turn} does not follow turn {last.turn} of the session")
        if line.t_ms <= last.t_ms:
            raise RowError("t_ms", f"{line.t_ms} is not later than the turn before ({last.t_ms})")
        if line.gap_ms is None:
            raise RowError("gap_ms", "may be null only in the first request of a session")
        if line.parent_session_id != last.parent_session_id:
            raise RowError("parent_session_id", "differs from the session's earlier rows")


def _check_runs(runs: list[tuple[int, int]]) -> None:
    if any(first + count - 1 > LARGEST_ID for first, count in runs):
        raise RowError("hash_runs", f"an id is larger than {LARGEST_ID}")
    ordered = sorted(runs)
    for (first, count), (following, _) in pairwise(ordered):
        if first + count > following:
            raise RowError("hash_runs", f"id {following} comes twice in one prompt")


# ---- Azure

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureReader:
    """Rows of the Azure LLM inference traces: one clock in steps of 100 ns, no block ids."""

    def __init__(self) -> None:
        self._places: tuple[int, int, int] | None = None  # of the three columns
        self._columns = 0
        self._first: datetime | None = None
        self._last: tuple[datetime, list[str]] | None = None  # time and values of the row before

    def row(self, text: str) -> TraceRow | None:
        """None for the header. Raises RowError."""
        values = [value.strip() for value in text.split(",")]
        if self._places is None:
            self._read_header(values)
            return None
        if len(values) != self._columns:
            missing = _AZURE_COLUMNS[max(range(3), key=self._places.__getitem__)]
            raise RowError(missing, f"the row has {len(values)} values, the header {self._columns}")
        when, context, generated = (values[place] for place in self._places)
        arrival = self._arrival(when, values)
        return TraceRow(arrival, _azure_tokens("ContextTokens", context), _azure_tokens("GeneratedTokens", generated))

    def _read_header(self, columns: list[str]) -> None:
        for name in _AZURE_COLUMNS:
            if columns.count(name) != 1:
                raise RowError(name, "the header must name this column once")
        first, second, third = (columns.index(name) for name in _AZURE_COLUMNS)
        self._places, self._columns = (first, second, third), len(columns)

    def _arrival(self, text: str, values: list[str]) -> float:
        try:
            time = datetime.fromisoformat(text)  # takes more than six decimals and drops them
            first, last = self._first or time, self._last or (time, [])
            seconds, step = (time - first).total_seconds(), (time - last[0]).total_seconds()
        except (ValueError, TypeError) as error:  # TypeError: one time has a zone, another has none
            raise RowError("TIMESTAMP", f"{text[:60]!r} is not a time such as 2023-11-16 18:17:03.9799600") from error
        if step < 0:
            raise RowError("TIMESTAMP", f"{text} is earlier than the row before ({last[0]})")
        if values == last[1]:
            raise RowError("TIMESTAMP", "the row is the same as the one before, with a clock that counts 100 ns")
        if seconds * 1e3 > LATEST_MS:
            raise RowError("TIMESTAMP", f"{text} is more than ten years after the first row")
        self._first, self._last = first, (time, values)
        return seconds


def _azure_tokens(field: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise RowError(field, f"{text[:60]!r} is not a number of tokens")
    if not 1 <= int(text) <= MOST_TOKENS:
        raise RowError(field, f"{text} is not between 1 and {MOST_TOKENS}")
    return int(text)


# ---- all of them

Reader = MooncakeReader | AzureReader | WekaReader
READERS: dict[TraceFormat, Callable[[], Reader]] = {
    "mooncake": MooncakeReader,
    "azure": AzureReader,
    "weka": WekaReader,
}

LineT = TypeVar("LineT")
_FIELD = re.compile(r"at `\$\.(\w+)|required field `(\w+)`")


def _decoded(decode: Callable[[str], LineT], text: str) -> LineT:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise RowError(found and (found[1] or found[2]), _as_sentence(str(error))) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowError(None, f"not JSON: {error}") from error


def _as_sentence(message: str) -> str:
    """msgspec's message without the path in it, which RowError has as a field."""
    problem = message.split(" - at ")[0]
    return problem[0].lower() + problem[1:]


def _check_count(field: str, count: int, input_len: int) -> None:
    """A prompt has an id for each whole block, and may have one for the part of a block at its end."""
    whole = input_len // BLOCK_TOKENS
    if not whole <= count <= -(-input_len // BLOCK_TOKENS):
        raise RowError(field, f"{count} ids do not fit a prompt of {input_len} tokens in blocks of {BLOCK_TOKENS}")
