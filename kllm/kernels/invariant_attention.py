"""Attention with one order of summation for every row, chunk and prefix.

Queries and keys are cut into tiles at absolute positions, so a token meets the same tiles of the same shape whatever
chunk it comes in. A pair is one query tile with one key tile:

    key tile        0      1      2                    pairs of one group, sorted by key tile, longest row first:
    query tile A  [A,0]  [A,1]  [A,2]                    [A,0] [B,0] [C,0] | [A,1] [B,1] | [A,2]
    query tile B  [B,0]  [B,1]                           starts  0            3             5
    query tile C  [C,0]

All pairs are multiplied in one batch of products of one shape. The maximum over key tiles is exact in any order;
sums are taken within a tile by the product itself (a column of ones) and over tiles in ascending order.
Masked keys add exact zeros: their scores are replaced, and what the cache holds after a row's last token is taken for
zeros, since blocks come with what their last owner left there and 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kllm.kernels.batch import ForwardBatch

QUERY_TILE = 4
KEY_TILE = 64
ONES = 8  # columns of ones; one would do, eight suit the product's kernels
MAX_KEYS = 2**16  # gathered cached tokens per group of query tiles, about
BLOCK = 16384  # elements per call of an element-wise function, see kllm.kernels.invariant


@dataclass(frozen=True, slots=True)
class PairGroup:
    """n query tiles and their P pairs.

    queries int64 [n · QUERY_TILE]: token index, or T for places outside the step.
    present int64, targets int64: which of those places are tokens, and which tokens they are.
    pieces int64 [P · KEY_TILE / unit]: where the keys are, in runs of `unit` cached tokens.
    counts: query tiles that have a j-th key tile. ones [P, KEY_TILE, ONES].
    diagonal int64 [n]: each query tile's last pair; hidden bool [n, QUERY_TILE, KEY_TILE]: keys it must not see.
    stale int64: the places of [P · KEY_TILE] that lie after their row's last token.
    """

    queries: torch.Tensor
    present: torch.Tensor
    targets: torch.Tensor
    pieces: torch.Tensor
    unit: int
    counts: list[int]
    ones: torch.Tensor
    diagonal: torch.Tensor
    hidden: torch.Tensor
    stale: torch.Tensor
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def gather(self, cache: torch.Tensor, name: str, scales: torch.Tensor | None = None) -> torch.Tensor:
        """[P, KEY_TILE, Hkv, D] in float32, times scales, zeros where stale; valid until the next call with this
        name."""
        entries = self._gather(cache, name).float()
        if scales is not None:
            entries.mul_(self._gather(scales, f"{name} scales").unsqueeze(-1))
        entries.flatten(0, 1).index_fill_(0, self.stale, 0)
        return entries

    def _gather(self, cache: torch.Tensor, name: str) -> torch.Tensor:
        """[P, KEY_TILE, *entry] of cache [blocks, block_tokens, *entry]."""
        runs = cache.view(cache.shape[0] * cache.shape[1] // self.unit, -1)
        buffer = self.buffer(name, (len(self.pieces), runs.shape[1]), cache.dtype)
        torch.index_select(runs, 0, self.pieces, out=buffer)
        return buffer.view(-1, KEY_TILE, *cache.shape[2:])

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory kept for the step: fresh memory of this size costs page faults in every layer."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(shape, dtype=dtype)
        return self.buffers[name]


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
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, D], caches [blocks, block_tokens, Hkv, D], scales of their vectors [blocks, block_tokens, Hkv]; values
    are the first value_size elements of v_cache's entries. Computed in float32. Returns [T, H, value_size] in q's
    type."""
    groups: list[PairGroup] | None = batch.derived.get(PairGroup)
    if groups is None:
        groups = batch.derived[PairGroup] = _lay_out(batch)
    padded = torch.cat((q.float() * scale, q.new_zeros(1, *q.shape[1:], dtype=torch.float32)))
    out = torch.empty(q.shape[0], q.shape[1], value_size, dtype=torch.float32)
    for group in groups:
        keys = group.gather(k_cache, "keys", k_scales)
        values = keys if v_cache is k_cache else group.gather(v_cache, "values", v_scales)
        result = _attend_group(padded, keys, values[..., :value_size], group)
        out.index_copy_(0, group.targets, result.index_select(0, group.present))
    return out.to(q.dtype)


def _attend_group(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: PairGroup) -> torch.Tensor:
    """keys, values [P, KEY_TILE, Hkv, D]. Returns [n · QUERY_TILE, H, D of values]."""
    kv_heads, size = keys.shape[2:]
    query = q.index_select(0, group.queries).view(-1, QUERY_TILE, kv_heads, q.shape[1] // kv_heads, size)
    query = query.permute(2, 0, 1, 3, 4).reshape(kv_heads, len(group.diagonal), -1, size)
    paired = torch.cat([query[:, :count] for count in group.counts], dim=1)
    scores = group.buffer("scores", (*paired.shape[:3], KEY_TILE))
    for head in range(kv_heads):
        torch.bmm(paired[head], keys[:, :, head].transpose(1, 2), out=scores[head])
    _exponentials(scores, group)

    values, spoilt = _without_broken(values, group)
    partial = group.buffer("partial", (*paired.shape[:3], values.shape[3]))
    sums = group.buffer("sums", (*paired.shape[:3], ONES))
    for head in range(kv_heads):
        torch.bmm(scores[head], values[:, :, head], out=partial[head])
        torch.bmm(scores[head], group.ones, out=sums[head])
    total, norm = _over_tiles(partial, group.counts), _over_tiles(sums, group.counts)[..., :1]
    result = (total / norm).view(kv_heads, len(group.diagonal), QUERY_TILE, -1, values.shape[3])
    if spoilt is not None:
        result.masked_fill_(spoilt, float("nan"))
    return result.permute(1, 2, 0, 3, 4).reshape(-1, q.shape[1], values.shape[3])


def _without_broken(values: torch.Tensor, group: PairGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values with zeros for those of diagonal pairs that are not finite, and which queries see one of these: bool
    [Hkv, n, QUERY_TILE, 1, 1], None where all are surely finite. 0 times NaN is NaN: left where they are, they would
    spoil queries before them too."""
    own = values.index_select(0, group.diagonal)
    if bool(own.sum().isfinite()):  # takes a small part of the time of a look at every element
        return values, None
    broken = ~own.isfinite().all(dim=-1)  # [n, KEY_TILE, Hkv]
    own.masked_fill_(broken.unsqueeze(-1), 0)
    seen = (broken[:, None] & ~group.hidden[..., None]).any(dim=2)
    return values.index_copy(0, group.diagonal, own), seen.permute(2, 0, 1)[..., None, None]


def _exponentials(scores: torch.Tensor, group: PairGroup) -> None:
    """Scores [Hkv, P, QUERY_TILE · G, KEY_TILE] to exp(score - largest of the query), 0 where hidden; in place."""
    last = scores.index_select(1, group.diagonal)
    by_query = last.view(*last.shape[:2], QUERY_TILE, -1, KEY_TILE)
    by_query.masked_fill_(group.hidden[:, :, None, :], float("-inf"))
    scores.index_copy_(1, group.diagonal, last)
    starts = _starts(group.counts)
    top = scores[:, : group.counts[0]].amax(-1, keepdim=True)
    for start, count in starts[1:]:
        tile_top = scores[:, start : start + count].amax(-1, keepdim=True)
        top[:, :count] = torch.maximum(top[:, :count], tile_top)
    for start, count in starts:
        scores[:, start : start + count] -= top[:, :count]
    for part in scores.view(-1).split(BLOCK):  # whole vectors: KEY_TILE is a multiple of every vector loop
        part.exp_()


def _over_tiles(partial: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Sum over each query tile's key tiles, in ascending order: [Hkv, P, ...] to [Hkv, n, ...]; changes partial."""
    starts = _starts(counts)
    total = partial[:, : counts[0]]
    for start, count in starts[1:]:
        total[:, :count] += partial[:, start : start + count]
    return total


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
    diagonal = first_pair[key_tiles - 1] + torch.arange(len(tiles))
    key_position = (key_tiles - 1)[:, None] * KEY_TILE + torch.arange(KEY_TILE)
    pieces = torch.cat([_pieces(batch, rows[:count], last[:count], j) for j, count in enumerate(counts)])
    return PairGroup(
        queries=torch.where(inside, token, batch.positions.shape[0]).flatten(),
        present=inside.flatten().nonzero().squeeze(1),
        targets=token[inside],
        pieces=pieces,
        unit=_unit(batch),
        counts=counts,
        ones=torch.ones(sum(counts), KEY_TILE, ONES),
        diagonal=diagonal,
        hidden=key_position[:, None, :] > position[:, :, None],
        stale=(diagonal[:, None] * KEY_TILE + torch.arange(KEY_TILE))[key_position > last[:, None]],
    )


def _unit(batch: ForwardBatch) -> int:
    """Cached tokens that lie together both in a block and in a key tile."""
    return math.gcd(batch.block_tokens, KEY_TILE)


def _pieces(batch: ForwardBatch, rows: torch.Tensor, last: torch.Tensor, tile: int) -> torch.Tensor:
    """Runs of key tile `tile` of these rows, flat; runs after the row's last token repeat the run it is in."""
    unit = _unit(batch)
    run = torch.minimum(tile * (KEY_TILE // unit) + torch.arange(KEY_TILE // unit), last[:, None] // unit)
    per_block = batch.block_tokens // unit
    return (batch.tables[rows[:, None], run // per_block] * per_block + run % per_block).flatten()
