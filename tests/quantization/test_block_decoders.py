from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kllm.hub.gguf import TENSOR_TYPES
from kllm.quantization.block_decoders import decode

_QUANTISED = [kind for kind in TENSOR_TYPES.values() if kind.block > 1]
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
_HALVES["Q6_K"] = [208]


def random_blocks(kind, rows: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite fp16 scales: every pattern a file can hold, [rows, bytes of two blocks]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * 2, kind.size), dtype=np.uint8)
    for start in _HALVES[kind.name]:
        scales = rng.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", _QUANTISED, ids=lambda kind: kind.name)
def test_equals_ggml_bit_for_bit(kind, dtype):
    rows = 300000 // (2 * kind.block)  # several pieces and a last one that is not full
    packed = random_blocks(kind, rows)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind.name])).to(dtype)
    raw = torch.from_numpy(packed).view(-1)
    assert torch.equal(decode(raw, kind, (rows, 2 * kind.block), dtype), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_copied_even_when_not_aligned(name):
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    values = torch.randn(4, 8).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name])
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), values.view(torch.uint8).flatten()])[1:]
    got = decode(shifted, kind, (4, 8), torch.float32)
    assert torch.equal(got, values.float())
    assert got.data_ptr() != values.data_ptr()
