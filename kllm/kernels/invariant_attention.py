"""Attention with one order of summation for every row, chunk and prefix.

Queries and keys are cut into tiles at absolute positions, so a token meets the same tiles of the same shape whatever
chunk it comes in. A pair is one query tile with one key tile:

    key tile        0      1      2                    pairs of one group, sorted by key tile, longest row first:
    query tile A  [A,0]  [A,1]  [A,2]                    [A,0] [B,0] [C,0] | [A,1] [B,1] | [A,2]
    query tile B  [B,0]  [B,1]                           starts  0            3             5
    query tile C  [C,0]

All pairs are multiplied in one batch of products of one shape. The maximum over key tiles is exact in any order;
sums are taken within a tile by the product itself (a column of ones) and over tiles in ascending order.
Masked keys add exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kllm.kernels.batch import ForwardBatch

QUERY_TILE = 4
KEY_TILE = 64
ONES = 8  # columns of ones beside the values; one would do, eight keep rows aligned
MAX_KEYS = 2**16  # gathered cached tokens per group of query tiles, about

Blockwise = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PairGroup:
    """n query tiles and their P pairs.

    queries int64 [n · QUERY_TILE]: token index, or T for places outside the step.
    present int64, targets int64: which of those places are tokens, and which tokens they are.
    slots int64 [P · KEY_TILE]: cache slot of every key. counts: query tiles that have a j-th key tile.
    diagonal int64 [n]: each query tile's last pair; hidden bool [n, QUERY_TILE, KEY_TILE]: keys it must not see.
    """

    queries: torch.Tensor
    present: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    counts: list[int]
    diagonal: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _QueryTile:
    row: int
    index: int
    first_token: int  # token index that position index * QUERY_TILE has, or would have
    span_first: int
    span_last: int  # positions of the row's first and last token in the step

    @property
    def key_tiles(self) -> int:
        return self.index * QUERY_TILE // KEY_TILE + 1


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    value_size: int,
    blockwise: Blockwise,
) -> torch.Tensor:
    """q [T, H, D], caches [blocks, block_tokens, Hkv, D]; values are the first value_size elements of v_cache's
    entries. Computed in float32. Returns [T, H, value_size] in q's type."""
    groups: list[PairGroup] | None = batch.derived.get(PairGroup)
    if groups is None:
        groups = batch.derived[PairGroup] = _lay_out(batch)
    padded = torch.cat((q.float() * scale, q.new_zeros(1, *q.shape[1:], dtype=torch.float32)))
    out = torch.empty(q.shape[0], q.shape[1], value_size, dtype=torch.float32)
    for group in groups:
        result = _attend_group(padded, k_cache, v_cache, group, value_size, blockwise)
        out.index_copy_(0, group.targets, result.index_select(0, group.present))
    return out.to(q.dtype)


def _attend_group(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: PairGroup,
    value_size: int,
    blockwise: Blockwise,
) -> torch.Tensor:
    """Returns [n · QUERY_TILE, H, value_size]."""
    kv_heads = k_cache.shape[2]
    heads = q.shape[1] // kv_heads
    query = q.index_select(0, group.queries).view(-1, QUERY_TILE, kv_heads, heads, q.shape[2])
    query = query.permute(0, 2, 1, 3, 4).reshape(-1, kv_heads, QUERY_TILE * heads, q.shape[2])
    keys, values = _gather(k_cache, group.slots), _gather(v_cache, group.slots)[..., :value_size]
    paired = torch.cat([query[:count] for count in group.counts])
    scores = _products(paired, keys.permute(0, 2, 3, 1))
    _hide(scores, group, heads)

    starts = _starts(group.counts)
    top = scores[: group.counts[0]].amax(-1, keepdim=True)
    for start, count in starts[1:]:
        top[:count] = torch.maximum(top[:count], scores[start : start + count].amax(-1, keepdim=True))
    for start, count in starts:
        scores[start : start + count] -= top[:count]
    weights = blockwise(torch.exp, scores)

    summed = torch.empty(values.shape[0], kv_heads, KEY_TILE, value_size + ONES)
    summed[..., :value_size] = values.transpose(1, 2)
    summed[..., value_size:] = 1
    partial = _products(weights, summed)
    total = partial[: group.counts[0]]
    for start, count in starts[1:]:
        total[:count] += partial[start : start + count]
    result = total[..., :value_size] / total[..., value_size : value_size + 1]
    result = result.view(-1, kv_heads, QUERY_TILE, heads, value_size).permute(0, 2, 1, 3, 4)
    return result.reshape(-1, kv_heads * heads, value_size)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[P, Hkv, m, k] times [P, Hkv, k, n]."""
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return product.view(*a.shape[:3], b.shape[3])


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[P, KEY_TILE, Hkv, D] in float32."""
    entries = cache.view(-1, *cache.shape[2:]).index_select(0, slots)
    return entries.float().view(-1, KEY_TILE, *cache.shape[2:])


def _hide(scores: torch.Tensor, group: PairGroup, heads: int) -> None:
    """-inf where a query must not look; scores [P, Hkv, QUERY_TILE · heads, KEY_TILE]."""
    last = scores.index_select(0, group.diagonal)
    by_query = last.view(last.shape[0], last.shape[1], QUERY_TILE, heads, KEY_TILE)
    by_query.masked_fill_(group.hidden[:, None, :, None, :], float("-inf"))
    scores.index_copy_(0, group.diagonal, last)


def _starts(counts: list[int]) -> list[tuple[int, int]]:
    """(first pair, pairs) of every key tile."""
    starts, first = [], 0
    for count in counts:
        starts.append((first, count))
        first += count
    return starts


def _lay_out(batch: ForwardBatch) -> list[PairGroup]:
    tiles: list[_QueryTile] = []
    for row, span in enumerate(batch.spans):
        first, last = span.context - span.count, span.context - 1
        tiles.extend(
            _QueryTile(row, index, span.start + index * QUERY_TILE - first, first, last)
            for index in range(first // QUERY_TILE, last // QUERY_TILE + 1)
        )
    tiles.sort(key=lambda tile: -tile.key_tiles)
    groups: list[list[_QueryTile]] = []
    keys = 0
    for tile in tiles:
        keys += tile.key_tiles * KEY_TILE
        if not groups or keys > MAX_KEYS:
            groups.append([])
            keys = tile.key_tiles * KEY_TILE
        groups[-1].append(tile)
    return [_group(batch, members) for members in groups]


def _group(batch: ForwardBatch, tiles: list[_QueryTile]) -> PairGroup:
    key_tiles = torch.tensor([tile.key_tiles for tile in tiles])
    counts = [int((key_tiles > j).sum()) for j in range(tiles[0].key_tiles)]
    first_pair = torch.tensor([start for start, _ in _starts(counts)])
    rows = torch.tensor([tile.row for tile in tiles])
    last = torch.tensor([tile.span_last for tile in tiles])
    position = torch.tensor([tile.index for tile in tiles])[:, None] * QUERY_TILE + torch.arange(QUERY_TILE)
    token = torch.tensor([tile.first_token for tile in tiles])[:, None] + torch.arange(QUERY_TILE)
    inside = (position >= torch.tensor([tile.span_first for tile in tiles])[:, None]) & (position <= last[:, None])
    key_position = (key_tiles - 1)[:, None] * KEY_TILE + torch.arange(KEY_TILE)
    return PairGroup(
        queries=torch.where(inside, token, batch.positions.shape[0]).flatten(),
        present=inside.flatten().nonzero().squeeze(1),
        targets=token[inside],
        slots=torch.cat([_key_slots(batch, rows[:count], last[:count], j) for j, count in enumerate(counts)]),
        counts=counts,
        diagonal=first_pair[key_tiles - 1] + torch.arange(len(tiles)),
        hidden=key_position[:, None, :] > position[:, :, None],
    )


def _key_slots(batch: ForwardBatch, rows: torch.Tensor, last: torch.Tensor, tile: int) -> torch.Tensor:
    """Slots of key tile `tile` of these rows, flat; positions after the row's last token repeat that token."""
    position = torch.minimum(tile * KEY_TILE + torch.arange(KEY_TILE), last[:, None])
    block = batch.tables[rows[:, None], position // batch.block_tokens]
    return (block * batch.block_tokens + position % batch.block_tokens).flatten()
