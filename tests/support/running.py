"""Runs a model without an engine: one sequence after another through a paged cache, in any chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.reference_math import make_batch, shuffled_tables

from kllm.cache.kv_spec import KVSpec
from kllm.kernels.linear import QuantizedRows
from kllm.models.interface import KVCache, Model
from kllm.models.weights.interface import WeightError


class DictCheckpoint:
    """A checkpoint (kllm.models.weights.interface) made of tensors in memory."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.config_file = "memory"
        self.files: tuple[Path, ...] = ()
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self.tensors:
            raise WeightError(f"memory: tensor {name} is missing")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightError(f"memory: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(dtype, copy=True)

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        return None


def allocate(spec: KVSpec, blocks: int) -> KVCache:
    return {
        record.name: [
            torch.zeros(blocks, spec.block_tokens // record.stride, *record.shape, dtype=getattr(torch, record.dtype))
            for _ in range(record.layers)
        ]
        for record in spec.full_group().records
    }


@torch.inference_mode()
def run_rows(
    model: Model, rows: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], block_tokens: int = 16, seed: int = 0
) -> list[torch.Tensor]:
    """Logits [len(row), vocab] of every row. steps: per step, how many tokens each row computes; rows with 0 sit out.
    All rows share one cache, in blocks of random order."""
    generator = torch.Generator().manual_seed(seed)
    tables = shuffled_tables([len(row) for row in rows], block_tokens, generator)
    cache = allocate(model.kv_spec(block_tokens), sum(map(len, tables)) + 1)
    done = [0] * len(rows)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for counts in steps:
        active = [row for row, count in enumerate(counts) if count]
        batch = make_batch([(done[row], counts[row]) for row in active], block_tokens, [tables[row] for row in active])
        tokens = [token for row in active for token in rows[row][done[row] : done[row] + counts[row]]]
        result = model.logits(model.forward(torch.tensor(tokens), batch, cache))
        for row, span in zip(active, batch.spans, strict=True):
            logits[row].append(result[span.start : span.start + span.count])
            done[row] += counts[row]
    return [torch.cat(parts) for parts in logits]
