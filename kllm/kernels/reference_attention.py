"""How a step's rows are grouped for attention in plain torch, and the two cores: many rows of one token, one chunk.

rows of one token, sorted by context, in groups of similar length      rows of several tokens, one by one
group   query  [B, H, C]                                               query  [tile, Hkv, G, D]  (128 tokens)
        keys   [B, L, C]  gathered, padded to the longest              keys   [Hkv, L, D]       up to tile end
        mask   [B, 1, L]                                               mask   [tile, tile]       last columns only

What a cache holds after a row's context is not read: blocks come with what their last owner left there, and a NaN
among it outlives both a mask that is added and a probability of 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from kllm.kernels.batch import ForwardBatch, Span

QUERY_TILE = 128
MAX_GATHERED = 2**19  # cached tokens gathered for one group of rows
MIN_FILL = 0.75  # shortest row of a group, relative to its longest


@dataclass(slots=True)
class Chunk:
    """A row with several tokens in the step: tokens [start, start + count) are the last of `context`."""

    start: int
    count: int
    context: int
    blocks: torch.Tensor
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def gather(
        self, cache: torch.Tensor, name: str, dtype: torch.dtype, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[context, *entry] of cache [blocks, block_tokens, *entry] as dtype, times scales [blocks, block_tokens,
        *entry but the last]; valid until the next call with this name."""
        return _entries(cache, self.blocks, name, self._buffers, dtype, scales).flatten(0, 1)[: self.context]


@dataclass(slots=True)
class DecodeGroup:
    """Rows with one token in the step. tokens int64 [B], blocks int64 [B · L / block_tokens], contexts int64 [B]."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    contexts: torch.Tensor
    length: int
    whole_batch: bool
    _outside: torch.Tensor | None = None
    _masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def gather(
        self, cache: torch.Tensor, name: str, dtype: torch.dtype, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, L, *entry], zeros after a row's context; else as Chunk.gather."""
        entries = _entries(cache, self.blocks, name, self._buffers, dtype, scales).flatten(0, 1)
        entries.index_fill_(0, self.outside(), 0)
        return entries.view(self.tokens.shape[0], -1, *cache.shape[2:])

    def outside(self) -> torch.Tensor:
        """int64: the places of [B · L] that lie after their row's context."""
        if self._outside is None:
            self._outside = self._is_outside().flatten().nonzero().squeeze(1)
        return self._outside

    def _is_outside(self) -> torch.Tensor:
        return torch.arange(self.length).unsqueeze(0) >= self.contexts.unsqueeze(1)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, L]: 0 within a row's context, -inf after it."""
        if dtype not in self._masks:
            outside = self._is_outside()
            mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))
            self._masks[dtype] = mask.unsqueeze(1)
        return self._masks[dtype]

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """The group's rows of x [T, ...]."""
        return x.contiguous() if self.whole_batch else x.index_select(0, self.tokens)

    def scatter(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Writes values [B, ...] to the group's rows of out [T, ...]."""
        if self.whole_batch:
            out.copy_(values)
        else:
            out.index_copy_(0, self.tokens, values)

    def as_chunks(self) -> list[Chunk]:
        rows = self.blocks.view(self.tokens.shape[0], -1)
        triples = zip(self.tokens.tolist(), self.contexts.tolist(), rows, strict=True)
        return [Chunk(token, 1, context, blocks) for token, context, blocks in triples]


@dataclass(slots=True)
class StepLayout:
    """Every row of a step, in exactly one decode group or chunk. Made once per step."""

    decode: list[DecodeGroup]
    chunks: list[Chunk]

    @staticmethod
    def of(batch: ForwardBatch) -> StepLayout:
        layout: StepLayout | None = batch.derived.get(StepLayout)
        if layout is None:
            layout = batch.derived[StepLayout] = _lay_out(batch)
        return layout


def _lay_out(batch: ForwardBatch) -> StepLayout:
    size = batch.block_tokens
    chunks = [
        Chunk(span.start, span.count, span.context, batch.tables[row, : -(-span.context // size)])
        for row, span in enumerate(batch.spans)
        if span.count > 1
    ]
    singles = [(row, span) for row, span in enumerate(batch.spans) if span.count == 1]
    groups = group_by_length(singles)
    whole = not chunks and len(groups) == 1
    if whole:
        groups[0].sort(key=lambda item: item[1].start)
    return StepLayout([_decode_group(batch, group, whole) for group in groups], chunks)


def group_by_length(rows: list[tuple[int, Span]]) -> list[list[tuple[int, Span]]]:
    """Rows of similar context together, longest first, each group within MIN_FILL and MAX_GATHERED."""
    groups: list[list[tuple[int, Span]]] = []
    longest = 0
    for row, span in sorted(rows, key=lambda item: -item[1].context):
        fits = groups and span.context >= MIN_FILL * longest and (len(groups[-1]) + 1) * longest <= MAX_GATHERED
        if fits:
            groups[-1].append((row, span))
        else:
            groups.append([(row, span)])
            longest = span.context
    return groups


def _decode_group(batch: ForwardBatch, rows: list[tuple[int, Span]], whole_batch: bool) -> DecodeGroup:
    blocks = max(-(-span.context // batch.block_tokens) for _, span in rows)
    return DecodeGroup(
        tokens=torch.tensor([span.start for _, span in rows]),
        blocks=batch.tables[[row for row, _ in rows], :blocks].flatten(),
        contexts=torch.tensor([span.context for _, span in rows]),
        length=blocks * batch.block_tokens,
        whole_batch=whole_batch,
    )


def _entries(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    name: str,
    buffers: dict[str, torch.Tensor],
    dtype: torch.dtype,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """[n, block_tokens, *entry] of n blocks, as dtype and scaled."""
    gathered = _gather(cache, blocks, name, buffers).view(-1, *cache.shape[1:])
    if scales is None and cache.dtype == dtype:
        return gathered
    converted = buffers.get(f"{name} as floats")
    if converted is None:
        converted = buffers[f"{name} as floats"] = torch.empty(gathered.shape, dtype=dtype)
    if scales is None:
        return converted.copy_(gathered)
    factors = _gather(scales, blocks, f"{name} scales", buffers).view(-1, *scales.shape[1:], 1)
    return torch.mul(gathered, factors, out=converted)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, name: str, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whole blocks of a cache, into a buffer kept for the step: fresh memory of this size costs page faults."""
    pages = cache.view(cache.shape[0], -1)
    buffer = buffers.get(name)
    if buffer is None:
        buffer = buffers[name] = pages.new_empty(blocks.shape[0], pages.shape[1])
    return torch.index_select(pages, 0, blocks, out=buffer)


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """One query per head and row: q [B, H, C], k [B, L, C], v [B, L, Cv], mask [B, 1, L]. Returns [B, H, Cv]."""
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    return _weigh(torch.softmax(scores, dim=-1), v)


def _weigh(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """weights [B, M, L] x v [B, L, Cv], rows that are not finite without an effect on others. With AMX, oneDNN reads on
    into the next row where L is no multiple of 32, and multiplies what it finds there by 0: NaN, if that is NaN."""
    out = torch.bmm(weights, v)
    if bool(out.sum(dtype=torch.float32).isfinite()):
        return out
    broken = weights.isnan()
    return torch.bmm(weights.masked_fill(broken, 0), v).masked_fill_(broken.any(dim=-1, keepdim=True), float("nan"))


def attend_rows_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query per head and row, query heads of a KV head folded into the query dimension.
    q [B, H, D], k and v [B, L, Hkv, D], mask [B, 1, L]. Returns [B, H, D]."""
    folded = q.view(q.shape[0], k.shape[2], -1, q.shape[2])
    out = F.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.unsqueeze(1), scale=scale
    )
    return out.reshape(q.shape)


def attend_chunk(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, scale: float
) -> None:
    """Causal attention of the last `count` of L tokens, in tiles of queries: keys after a tile are never touched.

    q [count, Hkv, G, D], k [Hkv, L, D], v [Hkv, L, Dv]; writes out [count, Hkv, G, Dv]. Twice as fast on CPU
    as torch's causal SDPA (Zen 4, bfloat16, 512 tokens), and takes any offset and value size.
    A token that is not finite spoils the queries from it on, and none before: other requests may share their KV."""
    heads, length = k.shape[:2]
    group = q.shape[2]
    own_keys, own_values = k[:, length - count :], v[:, length - count :]
    sums = own_keys.sum(dtype=torch.float32) + own_values.sum(dtype=torch.float32)
    doubtful = not bool(sums.isfinite())  # a sum takes a thirtieth of the time of a look at every element
    if doubtful:  # queries before such a value meet it with a probability of 0, and 0 times NaN is NaN
        broken = ~own_values.isfinite().all(dim=-1)  # [Hkv, count]
        v = v.clone()
        v[:, length - count :].masked_fill_(broken.unsqueeze(-1), 0)
    for first in range(0, count, QUERY_TILE):
        last = min(first + QUERY_TILE, count)
        tile, end = last - first, length - count + last
        query = q[first:last].permute(1, 2, 0, 3).reshape(heads, group * tile, -1)
        scores = torch.baddbmm(query.new_zeros(1, 1, 1), query, k[:, :end].transpose(1, 2), beta=0, alpha=scale)
        own = scores.view(heads, group, tile, end)[..., end - tile :]
        if doubtful:
            own.masked_fill_(torch.ones(tile, tile, dtype=torch.bool).triu_(1), float("-inf"))
        else:  # three times as fast
            own += torch.full((tile, tile), float("-inf"), dtype=q.dtype).triu_(1)
        result = _weigh(torch.softmax(scores, dim=-1), v[:, :end])
        out[first:last] = result.view(heads, group, tile, -1).permute(2, 0, 1, 3)
    if doubtful:
        out.masked_fill_(broken.cummax(dim=1).values.T[:, :, None, None], float("nan"))
