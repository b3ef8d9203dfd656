"""Attention and caches written the slow obvious way, to test operators and models against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kllm.kernels.batch import ForwardBatch, Span


def make_batch(rows: Sequence[tuple[int, int]], block_tokens: int, tables: Sequence[Sequence[int]]) -> ForwardBatch:
    """rows: (tokens already cached, tokens in this step). tables: block ids of each row."""
    spans, positions, slots = [], [], []
    for (cached, count), table in zip(rows, tables, strict=True):
        spans.append(Span(len(positions), count, cached + count))
        for position in range(cached, cached + count):
            positions.append(position)
            slots.append(table[position // block_tokens] * block_tokens + position % block_tokens)
    width = max(len(table) for table in tables)
    padded = [list(table) + [0] * (width - len(table)) for table in tables]
    return ForwardBatch(torch.tensor(positions), torch.tensor(slots), torch.tensor(padded), spans, block_tokens)


def shuffled_tables(lengths: Sequence[int], block_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Tables for rows of these lengths, with distinct blocks in random order, block 0 left out."""
    needed = [-(-length // block_tokens) for length in lengths]
    blocks = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    return [[blocks.pop() for _ in range(count)] for count in needed]


def naive_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: ForwardBatch, scale: float
) -> torch.Tensor:
    """Token by token and head by head in float64."""
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    out = torch.zeros(q.shape[0], heads, v_cache.shape[3], dtype=torch.float64)
    keys, values = (c.reshape(-1, *c.shape[2:]).double() for c in (k_cache, v_cache))
    for row, span in enumerate(batch.spans):
        for token in range(span.start, span.start + span.count):
            visible = range(int(batch.positions[token]) + 1)
            size = batch.block_tokens
            slots = [int(batch.tables[row, p // size]) * size + p % size for p in visible]
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = keys[slots, kv] @ q[token, head].double() * scale
                out[token, head] = torch.softmax(scores, 0) @ values[slots, kv]
    return out


def naive_mla(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """Expands every cached latent to keys and values of every head, in float64. key [H, dn, R], value [H, dv, R]."""
    rank = key.shape[2]
    latent, rope = cache[..., :rank].double(), cache[..., rank:].double()
    k_nope = torch.einsum("bsr,hdr->bshd", latent, key.double())
    k = torch.cat((k_nope, rope.unsqueeze(2).expand(-1, -1, key.shape[0], -1)), dim=-1)
    v = torch.einsum("bsr,hdr->bshd", latent, value.double())
    return naive_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, batch, scale)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; infinite for anything that is not finite."""
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf
