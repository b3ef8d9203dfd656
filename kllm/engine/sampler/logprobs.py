"""Log-probabilities of sampled and of prompt tokens: log_softmax of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kllm.request import TokenLogprobs

_SLICE_ELEMENTS = 4 * 2**20  # logits looked at together, so that long prompts need no second copy of theirs


class NonFiniteLogits(ValueError):
    """The model produced NaN or infinity where a log-probability was wanted."""


def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that follow. logits: [n, V], unchanged; next_tokens: n ids.

    Works through the rows in slices. Raises NonFiniteLogits.
    """
    if logits.shape[0] != len(next_tokens):
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(next_tokens)} tokens")
    step = max(1, _SLICE_ELEMENTS // max(1, logits.shape[1]))
    out: list[TokenLogprobs] = []
    for start in range(0, len(next_tokens), step):
        tokens = next_tokens[start : start + step]
        logprobs = torch.log_softmax(logits[start : start + step].float(), dim=-1)
        out += describe(logprobs, tokens, [num_top] * len(tokens))
    return out


def describe(logprobs: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of logprobs (float32 [n, V]): its token, the token's rank and the row's best num_top.

    rank: number of tokens at least as likely. Equally likely tokens are listed by id. Raises NonFiniteLogits.
    """
    index = torch.tensor(tokens, device=logprobs.device).unsqueeze(1)
    own = logprobs.gather(1, index)
    ranks = torch.count_nonzero(logprobs >= own, dim=-1).tolist()
    if 0 in ranks:  # NaN compares false even with itself
        raise NonFiniteLogits("the model's logits are not finite")
    tops = _tops(logprobs, num_top)
    return [
        TokenLogprobs(token, value, rank, top)
        for token, value, rank, top in zip(tokens, own.squeeze(1).tolist(), ranks, tops, strict=True)
    ]


def _tops(logprobs: Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(num_top, default=0), logprobs.shape[1])
    if most == 0:
        return [()] * len(num_top)
    values, indices = logprobs.topk(most, dim=-1)
    # Where more tokens than asked for are as likely as the last, which of them topk returns is arbitrary.
    crowded = (torch.count_nonzero(logprobs >= values[:, -1:], dim=-1) > most).tolist()
    out = []
    for i, (ids, best) in enumerate(zip(indices.tolist(), values.tolist(), strict=True)):
        if crowded[i]:
            candidates = (logprobs[i] >= values[i, -1]).nonzero().squeeze(1)
            order = logprobs[i, candidates].sort(descending=True, stable=True).indices[:most]
            ids, best = candidates[order].tolist(), logprobs[i, candidates[order]].tolist()
        ordered = sorted(zip(ids, best, strict=True), key=lambda pair: (-pair[1], pair[0]))
        out.append(tuple(ordered[: num_top[i]]))
    return out
