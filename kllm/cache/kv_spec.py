"""KVSpec: one declaration of the KV a model keeps, for every kind of attention.

A model declares records (what is kept per layer and token) in groups (rows that live and die together).
No other part of the engine asks which model it is.

    GQA    Group("full", [Record("k", L, (Hkv, D)), Record("v", L, (Hkv, D))])
    MLA    Group("full", [Record("latent", L, (R + dr,), shard="none")])

One page (block) of a group holds `block_tokens` tokens of every record and layer of that group:

    page = for each record, for each of its layers: [block_tokens // stride, *shape] of dtype
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


class Record(msgspec.Struct, frozen=True):
    """One kind of row.

    layers: number of layers that keep it. shape: of one entry. stride: tokens per entry.
    shard: how it divides over tensor-parallel ranks. role: whose attention reads it.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str
    stride: int = 1
    shard: Literal["none", "heads", "tokens"] = "none"
    role: Literal["target", "draft"] = "target"

    def entry_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def page_bytes(self, block_tokens: int) -> int:
        return self.layers * self.entry_bytes() * (block_tokens // self.stride)


class Group(msgspec.Struct, frozen=True):
    """Records that share block ids. keep: tokens retained while running (None: all).
    resume: rows that a prefix hit needs before its boundary (None: all, 0: none)."""

    name: str
    records: tuple[Record, ...]
    keep: int | None = None
    resume: int | None = None

    def page_bytes(self, block_tokens: int) -> int:
        return sum(record.page_bytes(block_tokens) for record in self.records)


class KVSpec(msgspec.Struct, frozen=True):
    """All groups of a model. giveback: matched blocks a hit must recompute (1 when a drafter needs their hidden state).
    model: identity of weights and numerics, so that KV of different models is never mixed."""

    groups: tuple[Group, ...]
    block_tokens: int
    giveback: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        for group in self.groups:
            for record in group.records:
                if self.block_tokens % record.stride:
                    raise ValueError(
                        f"block_tokens {self.block_tokens} is not a multiple of stride {record.stride} of {record.name}"
                    )

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    def page_bytes(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.page_bytes(self.block_tokens) for group in self.groups)

    def full_group(self) -> Group:
        """The only group, keeping every token. Raises ValueError for specs with windowed or several groups,
        which the block pool of one table per request cannot hold."""
        if len(self.groups) != 1 or self.groups[0].keep is not None:
            raise ValueError("only models with one group that keeps all tokens are supported by this cache")
        return self.groups[0]
