from __future__ import annotations

from pathlib import Path

from support.engines import make_engine


def test_an_int8_cache_takes_less_memory(tiny_llama_folder: Path) -> None:
    """A head's vector of 16 floats takes 64 bytes, in int8 with its scale 20."""
    blocks = {}
    for dtype in ("float32", "int8"):
        engine = make_engine(
            tiny_llama_folder, kernels="reference", dtype="float32", kv_cache_dtype=dtype, kv_cache_memory=10 * 2**20
        )
        blocks[dtype] = engine.num_blocks
        engine.core.close()
    page = 16 * 4 * 2 * 2  # tokens, layers, key and value, heads
    assert blocks == {"float32": 10 * 2**20 // (page * 64), "int8": 10 * 2**20 // (page * 20)}
