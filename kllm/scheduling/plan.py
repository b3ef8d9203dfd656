"""Plan: what one step computes, as a difference to the step before; and what comes back from it.

There are no phases in a plan. A request has tokens and a number of them whose KV is computed;
a row of a plan makes it catch up by `count` tokens, and samples when nothing is left to catch up.
A row id is a permanent place in the runner from NewRow until the id appears in `ended`.

Within one plan the runner applies: ended, new, remaps, then the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kllm.costs.step import StepWork
from kllm.request import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRow:
    """A row that the runner has not seen. Its step follows in the same plan.

    tokens: all known tokens (prompt, then outputs of earlier steps or attempts).
    start: tokens whose KV is already in `blocks` (a multiple of the block size, or 0).
    blocks: block table so far. `seed` is never None here.
    """

    row: int
    request_id: str
    tokens: list[int]
    num_prompt: int
    start: int
    blocks: list[int]
    params: SamplingParams
    seed: int


@dataclass(slots=True)
class RowStep:
    """Compute `count` more tokens of a row, after jumping over `skip` tokens found in the cache meanwhile.
    blocks: appended to its table.
    sample: the last of these tokens is the last one known, so its logits yield the next token.
    bind: a mask for this row arrives by Executor.bind before sampling.
    """

    row: int
    count: int
    blocks: list[int]
    sample: bool
    bind: bool = False
    skip: int = 0


@dataclass(slots=True)
class Plan:
    """One step. remaps: (row, index in its block table, new block) for pages found to be duplicates.

    work: what it computes, where attention reaches all tokens.
    """

    id: int
    steps: list[RowStep] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    remaps: list[tuple[int, int, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)

    @property
    def num_tokens(self) -> int:
        return sum(step.count for step in self.steps)

    @property
    def needs_bind(self) -> bool:
        return any(step.bind for step in self.steps)


@dataclass(slots=True)
class Late:
    """Values a plan could not know when it was made: grammar masks by row.

    A mask is a little-endian bitmask of ceil(vocab_size / 32) 32-bit words as bytes; a set bit allows the token.
    """

    masks: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class RowResult:
    """What one row produced. token is None when the row did not sample.
    prompt_logprobs: for the prompt tokens computed in this step whose successor is a prompt token.
    error: it must end with it. invalid: that is the request's own fault."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    invalid: bool = False


@dataclass(slots=True)
class StepResult:
    plan_id: int
    rows: dict[int, RowResult] = field(default_factory=dict)
    elapsed_s: float = 0.0
