"""Looking up rows of a packed matrix."""

from __future__ import annotations

import torch

from kllm.kernels.operators import EmbeddingTable


def look_up(table: EmbeddingTable, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of a packed table, float32 [T, hidden]. Raises IndexError for a token outside it."""
    matrix = table.data
    if isinstance(matrix, torch.Tensor):
        return matrix.index_select(0, tokens).float()
    out = torch.empty(tokens.shape[0], matrix.cols)
    matrix.read_rows(tokens.contiguous().data_ptr(), tokens.shape[0], out.data_ptr())
    return out
