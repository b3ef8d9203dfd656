"""Public request traces as samples: when requests came, how long they were, which prefixes they shared.

The traces hold no text. Token ids are made from block ids by a seeded generator, so that equal ids give equal
tokens and a prefix cache sees the sharing of the original. Sources, licences and fields: README.md beside the files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from kllm.benchmark.config import TraceName
from kllm.benchmark.dataset import Sample, TokenSource

TRACE_DIR = Path(__file__).parents[2] / "benchmarks" / "data" / "traces"
BLOCK_TOKENS = 512  # what one block id of these traces stands for

_FILES: dict[TraceName, str] = {
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "azure-code": "azure2023_code.csv",
    "azure-conv": "azure2023_conv.csv",
    "weka-agentic": "weka_agentic_512.jsonl",
}
_BLOCK, _TAIL = 2, 3  # first part of a token key: a block named by its id, or the rest of one request's prompt


class TraceError(ValueError):
    """A trace file is missing or is not what its name says."""


@dataclass(frozen=True)
class TraceRow:
    """One request as recorded. session: None unless the trace has conversations; gap_s is then the pause after the
    session's previous request (None for its first), and arrival_s counts from the start of the session."""

    arrival_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    session: str | None = None
    parent: str | None = None
    gap_s: float | None = None


def read_trace(name: TraceName, count: int | None = None, folder: Path = TRACE_DIR) -> list[TraceRow]:
    """The first `count` rows. Raises TraceError."""
    path = folder / _FILES[name]
    readers = {"azure-code": _read_azure, "azure-conv": _read_azure, "weka-agentic": _read_weka}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(islice(readers.get(name, _read_mooncake)(file), count))
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist: the traces come with kLLM's sources; name their folder") from error
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is not a {name} trace: {error!r}") from error
    return rows


def trace_samples(
    rows: list[TraceRow],
    source: TokenSource,
    scale: float,
    speed_up: float,
    session_starts_s: Iterator[float] | None = None,
) -> list[Sample]:
    """Samples with lengths times `scale` and times divided by `speed_up`.

    session_starts_s: for a trace of conversations, an iterator of the times at which they start, in seconds of the
    run (no speed-up is applied to them); by default all start at once. A sub-agent's session starts when its
    parent's clock says so.
    """
    samples: list[Sample] = []
    starts: dict[str, float] = {}
    last: dict[str, int] = {}
    for index, row in enumerate(rows):
        after: int | None = None
        arrival = row.arrival_s / speed_up
        if row.session is not None:
            after = last.get(row.session)
            if after is not None:
                arrival = (row.gap_s or 0.0) / speed_up
            elif row.parent is not None and row.parent in starts:
                arrival += starts[row.parent]
            else:
                arrival = next(session_starts_s) if session_starts_s is not None else 0.0
                starts[row.session] = arrival
            last[row.session] = index
        tokens = block_tokens(row, index, source, scale)
        samples.append(Sample(tokens, _scaled(row.output_len, scale), arrival, after))
    return samples


def block_tokens(row: TraceRow, index: int, source: TokenSource, scale: float) -> list[int]:
    """Token ids of one request: its blocks in order, then tokens of its own where the ids end before the prompt."""
    length, per_block = _scaled(row.input_len, scale), _scaled(BLOCK_TOKENS, scale)
    tokens: list[int] = []
    for block in row.block_ids:
        if len(tokens) >= length:
            break
        tokens += source.take(per_block, _BLOCK, block)
    if len(tokens) < length:
        tokens += source.take(length - len(tokens), _TAIL, index)
    return tokens[:length]


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _read_mooncake(lines: Any) -> Iterator[TraceRow]:
    for line in lines:
        row = json.loads(line)
        yield TraceRow(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def _read_azure(lines: Any) -> Iterator[TraceRow]:
    first: datetime | None = None
    for row in csv.DictReader(lines):
        time = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven decimals are recorded, six can be read
        first = first or time
        arrival = (time - first).total_seconds()
        yield TraceRow(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _read_weka(lines: Any) -> Iterator[TraceRow]:
    if json.loads(next(lines))["block_size"] != BLOCK_TOKENS:
        raise ValueError("unexpected block_size")
    for line in lines:
        row = json.loads(line)
        gap = row["gap_ms"]
        yield TraceRow(
            arrival_s=row["t_ms"] / 1e3,
            input_len=row["input_length"],
            output_len=row["output_length"],
            block_ids=tuple(id for start, count in row["hash_runs"] for id in range(start, start + count)),
            session=row["session_id"],
            parent=row.get("parent_session_id"),
            gap_s=None if gap is None else gap / 1e3,
        )
