"""The sampler: permanent rows, and one call per step that turns their logits into tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kllm.engine.sampler.draws import uniform
from kllm.engine.sampler.logprobs import NonFiniteLogits, describe, prompt_logprobs
from kllm.engine.sampler.processors import BatchRow, process
from kllm.engine.sampler.row import RowState
from kllm.engine.sampler.sampling import argmax, distribution, pick
from kllm.request import TokenLogprobs
from kllm.scheduling.plan import NewRow

__all__ = ["NonFiniteLogits", "SampledToken", "Sampler", "prompt_logprobs"]

NOT_FINITE = "the model's logits are not finite"
GRAMMAR_FAILED = "the grammar became too complex or allows no token"
NOTHING_ALLOWED = "the sampling parameters allow no token"


@dataclass(slots=True)
class SampledToken:
    """What one row sampled. With `error` set the row must end with it; token is then 0 and means nothing.
    invalid: it is the request's own fault."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    invalid: bool = False


class Sampler:
    """Sampling state of the rows of a runner. Not thread-safe: the runner's thread owns it.

    Where processors leave no token at all (say, min_tokens forbids the end and the grammar everything
    else), the row gets the model's first end-of-sequence token. It gets an error instead if the model
    has none, or if the grammar mask itself is empty: that is how a matcher says that it has failed.
    """

    def __init__(self, vocab_size: int, max_rows: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._rows: list[RowState | None] = [None] * max_rows

    def add(self, new_row: NewRow) -> None:
        """Start (or, after a preemption, start again) a row: `new_row.tokens` is its whole history."""
        self._rows[new_row.row] = RowState(new_row, self._vocab_size, self._eos)

    def remove(self, row: int) -> None:
        """Forget a row. Removing a free row is no error."""
        self._rows[row] = None

    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], masks: Mapping[int, bytes]
    ) -> list[SampledToken]:
        """Sample one token per row and append it to the row's history.

        logits: float32 [N, V], overwritten. rows: N row ids, each at most once. positions: index of the token
        being sampled in its request's sequence, that is, the number of tokens known so far.
        masks: grammar bitmasks by row id, as in plan.Late. A row with non-finite logits gets an error; the
        others are not affected. Raises ValueError for shapes that do not fit and KeyError for unknown rows.
        """
        if logits.shape != (len(rows), self._vocab_size) or len(positions) != len(rows):
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(rows)} rows of {self._vocab_size} tokens")
        if not rows:
            return []
        logits = logits.float().contiguous()
        states = [self._state(row) for row in rows]
        best = argmax(logits)
        highest = logits.gather(1, torch.from_numpy(best).to(logits.device).unsqueeze(1)).squeeze(1)
        finite = highest.isfinite().tolist()
        out = [
            SampledToken(token) if ok else SampledToken(0, error=NOT_FINITE)
            for token, ok in zip(best.tolist(), finite, strict=True)
        ]
        if masks or not all(state.plain for state in states):
            batch = [BatchRow(i, states[i], positions[i], masks.get(rows[i])) for i in range(len(rows)) if finite[i]]
            self._sample_special(logits, batch, out)
        return out

    def _sample_special(self, logits: Tensor, batch: list[BatchRow], out: list[SampledToken]) -> None:
        """Rows that are more than an argmax. `out` holds every row's argmax and gets what they sample."""
        reported = [row for row in batch if row.state.params.logprobs is not None]
        raw = torch.log_softmax(_select(logits, reported), dim=-1) if reported else None
        process(logits, batch)
        greedy = [row for row in batch if row.state.greedy and row.processed]
        if greedy:
            chosen = _select(logits, greedy)
            for row, token, value in zip(greedy, argmax(chosen).tolist(), chosen.amax(-1).tolist(), strict=True):
                out[row.index] = self._sampled(row, None if value == -math.inf else token)
        drawn = [row for row in batch if not row.state.greedy]
        if drawn:
            weights = distribution(_select(logits, drawn), [row.state for row in drawn])
            for row, weight in zip(drawn, weights, strict=True):
                out[row.index] = self._sampled(row, pick(weight, uniform(row.state.seed, row.position)))
        for row in batch:
            if out[row.index].error is None:
                row.state.append(out[row.index].token)
        if raw is not None:
            tokens = [out[row.index].token for row in reported]
            tops = [row.state.params.logprobs or 0 for row in reported]
            for row, logprobs in zip(reported, describe(raw, tokens, tops), strict=True):
                out[row.index].logprobs = logprobs

    def _sampled(self, row: BatchRow, token: int | None) -> SampledToken:
        if token is not None:
            return SampledToken(token)
        if row.mask is not None and not any(row.mask):
            return SampledToken(0, error=GRAMMAR_FAILED, invalid=True)
        return SampledToken(self._eos[0]) if self._eos else SampledToken(0, error=NOTHING_ALLOWED, invalid=True)

    def _state(self, row: int) -> RowState:
        state = self._rows[row]
        if state is None:
            raise KeyError(f"row {row} is not in the sampler")
        return state


def _select(logits: Tensor, batch: Sequence[BatchRow]) -> Tensor:
    """A copy of the logits of these rows."""
    # Not logits[indices], which takes 20 times as long on the CPU.
    return logits.index_select(0, torch.tensor([row.index for row in batch], device=logits.device))
