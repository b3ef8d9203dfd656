"""A slice of the agentic trace that loads a fleet: the beginnings of many sessions instead of all of a few.

The trace's sessions have 60 turns in the mean and pauses of hours: its first 600 requests are ten sessions over a day.
Taken are the first TURNS turns of each session (not of sub-agents) whose first prompt has at most LONGEST tokens, with
pauses of at most PAUSE_S; nine in ten pauses after a tool's call are below 72 s, half below 8 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kllm.workload.traces import TRACE_DIR

NAME = "agentic"
SOURCE = TRACE_DIR / "weka_agentic_512.jsonl"
TURNS = 6
PAUSE_S = 20.0
LONGEST = 100_000


def write_slice(path: Path, requests: int, pause_s: float = PAUSE_S) -> None:
    """Whole sessions, until there are so many requests or no more sessions. In the trace's own format."""
    with SOURCE.open(encoding="utf-8") as source:
        head = source.readline()
        rows = [json.loads(line) for line in source]
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("parent_session_id") is None:
            sessions.setdefault(row["session_id"], []).append(row)
    kept: list[dict[str, Any]] = []
    for turns in sessions.values():
        if len(kept) >= requests:
            break
        if turns[0]["input_length"] <= LONGEST:
            kept += [_shortened(turn, pause_s) for turn in turns[:TURNS]]
    path.write_text(head + "".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def _shortened(turn: dict[str, Any], pause_s: float) -> dict[str, Any]:
    gap = turn["gap_ms"]
    return turn if gap is None else turn | {"gap_ms": min(gap, round(1000 * pause_s))}
