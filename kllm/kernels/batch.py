"""What operators need to know about a step: which token belongs to which row, and where its KV lives.

tokens      [ row 0 chunk ........ | row 1 | row 2 | row 3 chunk .... ]     T in all
spans         start=0  count=9      9,1     10,1    11,6
positions   position of each token in its own sequence
slots       block * block_tokens + offset: where each token's KV is written
tables      block table of each row, padded with 0:  [R, max_blocks]
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One row's part of the step: tokens [start, start+count) attend to `context` tokens (their own included)."""

    start: int
    count: int
    context: int


@dataclass(slots=True)
class ForwardBatch:
    """positions, slots: int64 [T]. tables: int64 [R, max_blocks]. spans: R rows, in token order.
    wanted: int64 [W], ascending: tokens whose hidden states will be read; None means all of them.

    derived: what operators compute from the fields above (masks, gather indices), once per step instead of
    once per layer. The fields above therefore do not change after the first operator has seen the batch.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    spans: list[Span]
    block_tokens: int
    wanted: torch.Tensor | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict)
