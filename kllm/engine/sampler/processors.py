"""Logit processors: everything that changes logits before temperature.

They work in place on the rows of one step and touch only the tokens they concern: rows that share a
processor go through it together, as flat indices row * vocab_size + token into the logits.
All arithmetic is element-wise, so a row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kllm.engine.sampler.row import Ids, RowState

# What a byte of a bitmask adds to eight logits: adding is several times faster than filling under a mask.
_BYTE_PENALTIES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little"), 0.0, -np.inf)
_BYTE_PENALTIES = _BYTE_PENALTIES.astype(np.float32).reshape(256, 8)
_HIGHEST = torch.finfo(torch.float32).max


@dataclass(slots=True)
class BatchRow:
    """One row of a step. index: its row of the logits; position: index of the token being sampled
    in the request's sequence; mask: grammar bitmask as in plan.Late, or None."""

    index: int
    state: RowState
    position: int
    mask: bytes | None

    @property
    def processed(self) -> bool:
        return self.mask is not None or self.state.processed


def process(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    """Apply masks, allowed ids, bans, bias and penalties to `logits` (float32 [N, V], contiguous) in place."""
    batch = [row for row in batch if row.processed]
    if not batch:
        return
    _apply_masks(logits, batch)
    _keep_allowed(logits, batch)
    _ban(logits, batch)
    _add_bias(logits, batch)
    _penalise(logits, batch)


def _apply_masks(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    masked = [(row.index, row.mask) for row in batch if row.mask is not None]
    if not masked:
        return
    vocab_size = logits.shape[1]
    mask_bytes = 4 * -(-vocab_size // 32)
    for _, mask in masked:
        if len(mask) != mask_bytes:
            raise ValueError(f"a grammar mask must have {mask_bytes} bytes, got {len(mask)}")
    for index, mask in masked:
        penalties = _BYTE_PENALTIES[np.frombuffer(mask, np.uint8)].reshape(-1)[:vocab_size]
        logits[index] += _to(logits, penalties)


def _keep_allowed(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    for row in batch:
        if row.state.allowed is not None:
            ids = torch.from_numpy(row.state.allowed).to(logits.device)
            kept = logits[row.index, ids]
            logits[row.index] = -torch.inf
            logits[row.index, ids] = kept


def _ban(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    ids = [row.state.banned_at(row.position) for row in batch]
    if any(len(i) for i in ids):
        logits.view(-1)[_flat(logits, batch, ids)] = -torch.inf


def _add_bias(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    biased = [row for row in batch if row.state.bias_ids.size]
    if biased:
        where = _flat(logits, biased, [row.state.bias_ids for row in biased])
        logits.view(-1)[where] += _to(logits, np.concatenate([row.state.bias for row in biased]))


def _penalise(logits: Tensor, batch: Sequence[BatchRow]) -> None:
    rows = [(row, seen) for row in batch if (seen := row.state.counts) is not None and seen.ids.size]
    if not rows:
        return
    sizes = [seen.ids.size for _, seen in rows]
    params = [row.state.params for row, _ in rows]

    def per_token(values: list[float]) -> Tensor:
        return _to(logits, np.repeat(np.array(values, np.float32), sizes))

    where = _flat(logits, [row for row, _ in rows], [seen.ids for _, seen in rows])
    counts = _to(logits, np.concatenate([seen.counts for _, seen in rows]))
    repetition = per_token([p.repetition_penalty for p in params])
    values = logits.view(-1)[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([p.frequency_penalty for p in params]) * counts
    values -= per_token([p.presence_penalty for p in params]) * (counts > 0)
    # A tiny repetition penalty may push a logit past the largest float; infinity would become NaN later.
    logits.view(-1)[where] = values.clamp_(max=_HIGHEST)


def _flat(logits: Tensor, batch: Sequence[BatchRow], ids: Sequence[Ids]) -> Tensor:
    vocab_size = logits.shape[1]
    flat = np.concatenate([tokens + row.index * vocab_size for row, tokens in zip(batch, ids, strict=True)])
    return torch.from_numpy(flat).to(logits.device)


def _to(logits: Tensor, values: npt.NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
