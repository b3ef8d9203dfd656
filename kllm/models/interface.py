"""What the engine asks of a model. One file per architecture implements it."""

from __future__ import annotations

from typing import Protocol

import torch

from kllm.cache.kv_spec import KVSpec
from kllm.kernels.batch import ForwardBatch

KVCache = dict[str, list[torch.Tensor]]
"""Record name to one tensor per layer that keeps it: [num_blocks, block_tokens // stride, *shape]."""


class Model(Protocol):
    """Weights and arithmetic of one architecture. Holds no request state.

    vocab_size: rows of the logits. max_model_len: positions the model was made for.
    """

    vocab_size: int
    max_model_len: int
    dtype: torch.dtype

    def kv_spec(self, block_tokens: int) -> KVSpec: ...

    def forward(self, tokens: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """tokens int64 [T] to final hidden states [W, hidden] (after the last norm) of the tokens that batch.wanted
        names. Writes KV of all T tokens at batch.slots before attending, so a row sees its own chunk. Rows never see
        each other."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to float32 [N, vocab_size]."""
        ...
