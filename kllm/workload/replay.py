"""Trace rows as samples: lengths and times scaled, sharing kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from kllm.workload.sample import BLOCK, TAIL, Part, Sample
from kllm.workload.trace_readers import BLOCK_TOKENS, TraceRow


def trace_samples(
    rows: Sequence[TraceRow],
    scale: float = 1.0,
    speed_up: float = 1.0,
    session_starts_s: Iterator[float] | None = None,
) -> list[Sample]:
    """Samples with lengths times `scale` and times divided by `speed_up`.

    A prompt is the run of each of its blocks, named by the block's id, then a tail of its own where the ids end before
    the prompt does: at scale 1 prompts share exactly the tokens that the trace says. Lengths are at least 1.
    session_starts_s: for a trace of conversations, an iterator of the times at which they start, in seconds of the
    run (no speed-up is applied to them); by default all start at once. A sub-agent's session starts when its
    parent's clock says so.
    """
    samples: list[Sample] = []
    starts: dict[str, float] = {}
    last: dict[str, int] = {}
    blocks: dict[int, Part] = {}
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
        samples.append(Sample(_parts(row, index, scale, blocks), _scaled(row.output_len, scale), arrival, after))
    return samples


def _parts(row: TraceRow, index: int, scale: float, blocks: dict[int, Part]) -> tuple[Part, ...]:
    """blocks: the part of each whole block so far, so that prompts that share a block share the object."""
    left, per_block = _scaled(row.input_len, scale), _scaled(BLOCK_TOKENS, scale)
    parts: list[Part] = []
    for block in row.block_ids():
        if left <= 0:
            break
        part = blocks.get(block)
        if part is None:
            part = blocks[block] = ((BLOCK, block), per_block)
        parts.append(part if left >= per_block else (part[0], left))
        left -= per_block
    if left > 0:
        parts.append(((TAIL, index), left))
    return tuple(parts)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def describe_scaling(scale: float = 1.0, speed_up: float = 1.0) -> list[str]:
    """Sentences for a report of what was changed about a trace; none if nothing was."""
    sentences = []
    if scale != 1.0:
        sentences.append(f"lengths are {_factor(scale)} the trace's")
    if speed_up != 1.0:
        sentences.append(f"times between requests are {_factor(1 / speed_up)} the trace's")
    return sentences


def _factor(factor: float) -> str:
    """'1/4 of', '3 times' or '0.37 times'."""
    fraction = Fraction(factor).limit_denominator(1000)
    if abs(fraction - Fraction(factor)) > 1e-9 * factor or fraction.numerator != 1:
        return f"{factor:.4g} times"
    return f"{fraction} of"
