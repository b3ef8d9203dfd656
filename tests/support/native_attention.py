"""Calls native/attention.h and native/rotate.h on numpy arrays, and what they should give, in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32, BF16, I8 = range(3)
EXACT_I8 = 3
"""An int8 cache whose products take q and probabilities as two bytes."""
Floats = NDArray[np.float32]
Array = NDArray[Any]

_pointer, _int, _float, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_size_t


class AttentionTask(ctypes.Structure):
    _fields_ = [
        ("q", _pointer),
        ("q_stride", _size),
        ("out", _pointer),
        ("out_stride", _size),
        ("k_cache", _pointer),
        ("v_cache", _pointer),
        ("k_scales", _pointer),
        ("v_scales", _pointer),
        ("cache_type", _int),
        ("table", _pointer),
        ("block_tokens", _int),
        ("heads", _int),
        ("kv_heads", _int),
        ("head_dim", _int),
        ("scale", _float),
        ("head", _int),
        ("more_heads", _int),
        ("token", _int),
        ("queries", _int),
        ("context", _int),
        ("scratch", _pointer),
        ("scratch_bytes", _size),
        ("partial", _pointer),
        ("part", _int),
        ("next_table", _pointer),
        ("next_context", _int),
        ("exact", ctypes.c_bool),
    ]


class RotateTask(ctypes.Structure):
    _fields_ = [
        ("qkv", _pointer),
        ("stride", _size),
        ("cos", _pointer),
        ("sin", _pointer),
        ("positions", _pointer),
        ("slots", _pointer),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("eps", _float),
        ("k_cache", _pointer),
        ("v_cache", _pointer),
        ("k_scales", _pointer),
        ("v_scales", _pointer),
        ("cache_type", _int),
        ("heads", _int),
        ("kv_heads", _int),
        ("head_dim", _int),
        ("row", _int),
        ("row_end", _int),
    ]


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values: NDArray[np.uint16]) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def to_bytes(q: Floats) -> Floats:
    """Every last axis in 255 steps, as one byte a number holds it."""
    unit = np.abs(q).max(-1, keepdims=True) / np.float32(127)
    return np.rint(q / unit) * unit


def address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def empty_cache(kind: int, shape: tuple[int, ...]) -> Array:
    """A cache full of what must never be read: NaN, or the largest bytes."""
    if kind == F32:
        return np.full(shape, np.nan, np.float32)
    return np.full(shape, 0x7FC0, np.uint16) if kind == BF16 else np.full(shape, -128, np.int8)


def cache_values(kind: int, cache: Array, scales: Array | None) -> NDArray[np.float64]:
    """What the entries of a cache stand for."""
    if kind == I8:
        assert scales is not None
        return cache.astype(np.float64) * scales[..., None]
    return (from_bf16(cache) if kind == BF16 else cache).astype(np.float64)


@dataclass
class Case:
    """One row of `context` cached tokens, the last `queries` of which attend. Everything else in memory is poison."""

    rng: np.random.Generator
    kind: int
    head_dim: int
    group: int
    kv_heads: int
    block_tokens: int
    context: int
    queries: int
    spread: float = 1.0
    q: Floats = field(init=False)
    k: Array = field(init=False)
    v: Array = field(init=False)
    k_scales: Floats | None = field(init=False, default=None)
    v_scales: Floats | None = field(init=False, default=None)
    table: NDArray[np.int64] = field(init=False)
    exact: bool = field(init=False)

    def __post_init__(self) -> None:
        self.exact = self.kind == EXACT_I8
        self.kind = I8 if self.exact else self.kind
        blocks = -(-self.context // self.block_tokens)
        self.table = self.rng.permutation(blocks + 3)[:blocks].astype(np.int64)
        shape = (blocks + 3, self.block_tokens, self.kv_heads, self.head_dim)
        self.q = self._normal((self.queries, self.group * self.kv_heads, self.head_dim)) * np.float32(self.spread)
        if self.kind == I8 and not self.exact:  # so that what is left is the rounding of probabilities
            self.q = to_bytes(self.q)
        self.k, self.v = empty_cache(self.kind, shape), empty_cache(self.kind, shape)
        position = np.arange(self.context)
        where = (self.table[position // self.block_tokens], position % self.block_tokens)
        entries = (self.context, self.kv_heads, self.head_dim)
        if self.kind == I8:
            self.k_scales, self.v_scales = (np.full(shape[:3], np.nan, np.float32) for _ in range(2))
            for cache, scales in ((self.k, self.k_scales), (self.v, self.v_scales)):
                cache[where] = self.rng.integers(-127, 128, entries)
                scales[where] = self.rng.uniform(0.002, 0.03, entries[:2])
        else:
            for cache in (self.k, self.v):
                values = self._normal(entries)
                cache[where] = to_bf16(values) if self.kind == BF16 else values

    def _normal(self, shape: tuple[int, ...]) -> Floats:
        return self.rng.standard_normal(shape, np.float32)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def expected(self) -> NDArray[np.float64]:
        """[queries, heads, head_dim], from the values of the cache and, where it is bfloat16, q rounded to that."""
        position = np.arange(self.context)
        where = (self.table[position // self.block_tokens], position % self.block_tokens)
        k = cache_values(self.kind, self.k, self.k_scales)[where].repeat(self.group, axis=1)
        v = cache_values(self.kind, self.v, self.v_scales)[where].repeat(self.group, axis=1)
        q = (from_bf16(to_bf16(self.q)) if self.kind == BF16 else self.q).astype(np.float64)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
        last = self.context - self.queries + np.arange(self.queries)
        scores[:, position[None, :] > last[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, v)
        return result

    def task(self, head: int, token: int, count: int, out: Floats, scratch: Array) -> AttentionTask:
        heads = self.group * self.kv_heads
        return AttentionTask(
            q=address(self.q),
            q_stride=heads * self.head_dim,
            out=address(out),
            out_stride=heads * self.head_dim,
            k_cache=address(self.k),
            v_cache=address(self.v),
            k_scales=address(self.k_scales),
            v_scales=address(self.v_scales),
            cache_type=self.kind,
            table=address(self.table),
            block_tokens=self.block_tokens,
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            head=head,
            token=token,
            queries=count,
            context=self.context - self.queries + token + 1,
            exact=self.exact,
            scratch=address(scratch),
            scratch_bytes=scratch.nbytes,
        )

    def attend(self, library: ctypes.CDLL, chunk: int, heads: int = 1) -> Floats:
        """[queries, heads, head_dim], in tasks of `chunk` queries and `heads` KV heads. Scratch starts as NaN."""
        scratch = self.scratch(library)
        out = np.full(self.q.shape, np.nan, np.float32)
        for head in range(0, self.kv_heads, heads):
            for token in range(0, self.queries, chunk):
                task = self.task(head, token, min(chunk, self.queries - token), out, scratch)
                task.more_heads = min(heads, self.kv_heads - head) - 1
                library.attention(ctypes.byref(task))
        return out

    def attend_in_parts(self, library: ctypes.CDLL, heads: int = 1) -> Floats:
        """The same for the last query only, its context shared out in parts taken in descending order."""
        scratch = self.scratch(library)
        out = np.full(self.q.shape, np.nan, np.float32)
        parts = -(-self.context // library.keys_of_part())
        partial = np.full(parts * self.q.shape[1] * library.floats_of_part(self.head_dim), np.nan, np.float32)
        for head in range(0, self.kv_heads, heads):
            task = self.task(head, self.queries - 1, 1, out, scratch)
            task.more_heads = min(heads, self.kv_heads - head) - 1
            task.partial = address(partial)
            for task.part in reversed(range(parts)):
                library.attention(ctypes.byref(task))
            library.merge_parts(ctypes.byref(task))
        return out[-1]

    def scratch(self, library: ctypes.CDLL) -> Array:
        """Memory for a task, aligned to a cache line and filled with NaN."""
        bytes_ = library.attention_scratch(self.group, self.head_dim, self.kind)
        memory = np.full(bytes_ + 64, 0xFF, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + bytes_]
