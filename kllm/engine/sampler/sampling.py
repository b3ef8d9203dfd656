"""From processed logits to tokens: argmax, or temperature, min_p, top_k, top_p and a draw.

A row's token depends on its logits, parameters and random number only: every reduction runs along
one row in an order that the number of rows does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kllm.engine.sampler.row import RowState

Weights = npt.NDArray[np.float32]

_SEGMENT = 256  # tokens whose weights are summed before the search for the drawn one goes into them


def argmax(logits: Tensor) -> npt.NDArray[np.int64]:
    """Index of the largest logit of each row [N, V], the lowest index among equals; of a NaN where there is one."""
    # numpy's argmax is vectorised; torch's on the CPU takes about 20 times as long.
    best: npt.NDArray[np.int64]
    best = logits.numpy().argmax(axis=-1) if logits.device.type == "cpu" else logits.argmax(dim=-1).cpu().numpy()
    return best


def distribution(logits: Tensor, rows: Sequence[RowState]) -> Weights:
    """Weights [S, V] proportional to the probabilities that tokens are drawn from; 0 for those cut off.

    logits: float32 [S, V] after the processors, without NaN or +inf; overwritten. rows: theirs, none greedy.
    A row in which every logit is -inf gets weights of 0 throughout.
    top_k keeps every token that is as likely as the k-th. top_p keeps the most likely tokens until their sum
    reaches top_p; of equally likely ones those with lower ids come first.
    """
    highest = logits.amax(dim=-1, keepdim=True)
    empty = highest.isneginf()
    logits.masked_fill_(empty, 0.0)
    # Shifting by the maximum first keeps l / T from overflowing.
    logits.sub_(highest.masked_fill(empty, 0.0)).div_(_column(logits, [row.temperature for row in rows]))
    _cut_min_p(logits, rows)
    _cut_top_k(logits, rows)
    weights: Weights = torch.softmax(logits, dim=-1).cpu().numpy()
    for i, row in enumerate(rows):
        if row.params.top_p < 1.0:
            cut_top_p(weights[i], row.params.top_p)
    weights[empty.squeeze(1).cpu().numpy()] = 0.0
    return weights


def pick(weights: Weights, u: float) -> int | None:
    """Inverse of the cumulative distribution of weights [V] at u in [0, 1); None if all weights are 0."""
    starts = np.arange(0, len(weights), _SEGMENT)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    total = sums[-1]
    if not total > 0.0:
        return None
    # u * total may round up to total, which no token reaches.
    target = min(u * total, np.nextafter(total, 0.0))
    segment = int(np.searchsorted(sums, target, side="right"))
    inside = weights[segment * _SEGMENT : (segment + 1) * _SEGMENT]
    if segment:
        target -= sums[segment - 1]
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target, side="right"))
    # The sum of a segment may be rounded otherwise than its running sum: never step on a token of weight 0.
    place = min(place, int(np.flatnonzero(inside)[-1]))
    return segment * _SEGMENT + place


def cut_top_p(weights: Weights, top_p: float) -> None:
    """Set to 0 what top_p drops from the weights [V] of one row, in place.

    Ascending, a token is dropped while the running sum up to and including it is at most 1 - top_p; the
    largest stays. That is: it stays if the sum of those before it in descending order is below top_p.
    """
    total = float(weights.sum(dtype=np.float64))
    # Tokens below this together weigh less than 1 - top_p, so all are dropped: only the others need sorting.
    floor = np.float32(0.99 * (1.0 - top_p) * total / len(weights))
    ordered = np.sort(weights[weights >= floor])[::-1]
    before = np.cumsum(ordered, dtype=np.float64) - ordered
    kept = max(1, int(np.searchsorted(before, top_p * total, side="left")))
    threshold = ordered[kept - 1]
    weights[weights < threshold] = 0.0
    equal = np.flatnonzero(weights == threshold)
    above = np.count_nonzero(ordered > threshold)
    weights[equal[kept - above :]] = 0.0


def _cut_min_p(logits: Tensor, rows: Sequence[RowState]) -> None:
    """The largest logit of each row is 0 here, so p >= min_p * max p means l >= log(min_p)."""
    if any(row.params.min_p > 0.0 for row in rows):
        lowest = [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows]
        logits.masked_fill_(logits < _column(logits, lowest), -torch.inf)


def _cut_top_k(logits: Tensor, rows: Sequence[RowState]) -> None:
    chosen = [i for i, row in enumerate(rows) if row.top_k]
    if not chosen:
        return
    k = torch.tensor([rows[i].top_k for i in chosen], device=logits.device)
    where = torch.tensor(chosen, device=logits.device)
    part = logits.index_select(0, where)
    best = part.topk(int(k.max()), dim=-1).values
    kth = best.gather(1, (k - 1).unsqueeze(1))
    logits.index_copy_(0, where, part.masked_fill_(part < kth, -torch.inf))


def _column(logits: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)
