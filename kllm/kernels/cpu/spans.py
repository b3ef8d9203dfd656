"""The rows of a step as the extension reads them."""

from __future__ import annotations

import torch

from kllm.kernels.batch import ForwardBatch


def span_array(batch: ForwardBatch) -> torch.Tensor:
    """start, count and context of every row: int64 [R, 3]."""
    spans: torch.Tensor | None = batch.derived.get("spans")
    if spans is None:
        rows = [(span.start, span.count, span.context) for span in batch.spans]
        spans = batch.derived["spans"] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return spans
