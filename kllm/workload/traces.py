"""Recorded request traces: by name or by path, checked line by line, and their figures.

Sources, licences and fields of the named ones: README.md beside the files. What counts as a broken trace, and what real
traces have although it looks odd: kllm/workload/trace_readers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import BinaryIO, Literal, get_args

from kllm.workload.trace_readers import (
    BLOCK_TOKENS,
    LONGEST_LINE,
    READERS,
    RowError,
    TraceError,
    TraceFormat,
    TraceRow,
    recognise,
)

__all__ = ["TRACES", "TraceError", "TraceName", "TraceRow", "TraceStatistics", "read_trace", "trace_statistics"]

TraceName = Literal["mooncake-conversation", "mooncake-synthetic", "azure-code", "azure-conv", "weka-agentic"]
TRACES: tuple[TraceName, ...] = get_args(TraceName)
TRACE_DIR = Path(__file__).parents[2] / "benchmarks" / "data" / "traces"

_FILES: dict[str, str] = {
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "azure-code": "azure2023_code.csv",
    "azure-conv": "azure2023_conv.csv",
    "weka-agentic": "weka_agentic_512.jsonl",
}


def read_trace(
    trace: str | Path,
    *,
    limit_requests: int | None = None,
    limit_seconds: float | None = None,
    format: TraceFormat | None = None,
    folder: Path = TRACE_DIR,
) -> list[TraceRow]:
    """The rows of a named trace or of a file, in their order. Raises TraceError.

    limit_requests: the first so many. limit_seconds: those that came earlier than this, on the trace's clock or, with
    sessions, on the clock of their session. Lines after the last row that is needed are not read.
    format: recognised from the first line by default. folder: where named traces lie.
    """
    known = _FILES.get(str(trace))
    path = folder / known if known else Path(trace)
    try:
        with path.open("rb") as file:
            rows = list(islice(_rows(file, str(path), format, limit_seconds), limit_requests))
    except FileNotFoundError as error:
        hint = "the traces come with kLLM's sources; name their folder" if known else f"known are {', '.join(TRACES)}"
        raise TraceError(str(path), None, None, f"does not exist ({hint})") from error
    except OSError as error:
        raise TraceError(str(path), None, None, f"cannot be read: {error.strerror}") from error
    if not rows:
        raise TraceError(str(path), None, None, "holds no requests")
    return rows


def _rows(
    file: BinaryIO, name: str, format: TraceFormat | None, limit_seconds: float | None = None
) -> Iterator[TraceRow]:
    reader = None
    for number, text in _lines(file, name):
        if reader is None:
            format = format or recognise(text)
            if format is None:
                raise TraceError(name, number, None, f"not the first line of a {', '.join(READERS)} trace")
            reader = READERS[format]()
        try:
            row = reader.row(text)
        except RowError as error:
            raise TraceError(name, number, error.field, error.problem) from error
        if row is None:
            continue
        if limit_seconds is None or row.arrival_s < limit_seconds:
            yield row
        elif row.session is None:
            return  # one clock: nothing later is earlier


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of the lines that are not blank."""
    number = 0
    while raw := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(raw) > LONGEST_LINE:
            raise TraceError(name, number, None, f"longer than {LONGEST_LINE} bytes")
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise TraceError(name, number, None, f"not UTF-8 (byte {error.start + 1})") from error
        if text:
            yield number, text


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a trace. Lengths are tokens.

    span_s, requests_per_s and gap_cv (standard deviation of the gaps between arrivals / their mean) are None for
    sessions, whose clocks are their own. sessions: how many, with those of sub-agents; None without sessions.
    prefix_reuse: input tokens in blocks that the trace had before, as a cache that forgets nothing would find them /
    input tokens; None without block ids. An id at the end of a prompt may name a part of a block, which counts as such.
    """

    requests: int
    input_mean: float
    input_max: int
    output_mean: float
    output_max: int
    span_s: float | None
    requests_per_s: float | None
    gap_cv: float | None
    sessions: int | None
    prefix_reuse: float | None


def trace_statistics(rows: Sequence[TraceRow]) -> TraceStatistics:
    """Raises ValueError when there are no rows."""
    if not rows:
        raise ValueError("a trace without rows has no statistics")
    sessions = {row.session for row in rows if row.session is not None}
    gaps = [] if sessions else [later.arrival_s - row.arrival_s for row, later in pairwise(rows)]
    span = rows[-1].arrival_s - rows[0].arrival_s
    return TraceStatistics(
        requests=len(rows),
        input_mean=fmean(row.input_len for row in rows),
        input_max=max(row.input_len for row in rows),
        output_mean=fmean(row.output_len for row in rows),
        output_max=max(row.output_len for row in rows),
        span_s=None if sessions else span,
        requests_per_s=len(rows) / span if gaps and span else None,
        gap_cv=pstdev(gaps) / fmean(gaps) if gaps and span else None,
        sessions=len(sessions) or None,
        prefix_reuse=_prefix_reuse(rows) if any(row.block_runs for row in rows) else None,
    )


def _prefix_reuse(rows: Sequence[TraceRow]) -> float:
    seen: set[int] = set()
    reused = 0
    for row in rows:
        ids = set(row.block_ids())
        reused += min(len(ids & seen) * BLOCK_TOKENS, row.input_len)
        seen |= ids
    return reused / sum(row.input_len for row in rows)
