"""The native extension; sources in native/. Addresses are of contiguous memory that outlives the call."""

from collections.abc import Sequence
from typing import Any

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
def use_threads(threads: int, spin_us: int, cpus: Sequence[int]) -> None: ...
def threads() -> int: ...
def keep_freed_memory() -> None: ...
def read_bandwidth(bytes: int, threads: int, seconds: float) -> float: ...
def dot_rate(kind: str, threads: int, seconds: float) -> float: ...
def dot_instructions(kind: str) -> str: ...

class Arena:
    def __init__(self) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Matrix:
    def __init__(self, arena: Arena, format: str, rows: int, cols: int, gated: bool = False) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def fill(self, first: int, count: int, values: int) -> None: ...
    def fill_bf16(self, first: int, count: int, values: int) -> None: ...
    def fill_int8(self, first: int, count: int, values: int, scales: int) -> None: ...
    def fill_blocks(self, first: int, count: int, blocks: int) -> None: ...
    def read_rows(self, indices: int, count: int, out: int) -> None: ...

def linear(matrix: Matrix, x: int, rows: int, product: str, y: int, y_type: str, bias: int) -> None: ...
def attention(
    q: int,
    out: int,
    k_cache: int,
    v_cache: int,
    k_scales: int,
    v_scales: int,
    cache_type: str,
    tables: int,
    table_width: int,
    spans: int,
    rows: int,
    block_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    exact: bool,
) -> None: ...

class Decoder:
    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        product: str,
        int8_products: bool,
        cos: Any,
        sin: Any,
        final_norm: Any,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: Any,
        qkv: Matrix,
        qkv_bias: Any,
        q_norm: Any,
        k_norm: Any,
        out: Matrix,
        out_bias: Any,
        mlp_norm: Any,
        gate_up: Matrix,
        gate_up_bias: Any,
        down: Matrix,
        down_bias: Any,
    ) -> None: ...
    def forward(
        self,
        x: int,
        tokens: int,
        positions: int,
        slots: int,
        tables: int,
        table_width: int,
        spans: int,
        rows: int,
        wanted: int,
        wanted_count: int,
        block_tokens: int,
        cache_type: str,
        caches: int,
        out: int,
    ) -> None: ...
    timing: bool
    def take_seconds(self) -> dict[str, float]: ...
