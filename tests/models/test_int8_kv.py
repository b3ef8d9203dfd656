"""Models that keep their keys and values in int8, with one scale per token and head."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from support.reference_math import error
from support.running import DictCheckpoint, run_rows
from support.tiny_models import LLAMA_CONFIG, llama_weights

from kllm.kernels import cpu
from kllm.kernels.registry import get_operators
from kllm.models.interface import Model
from kllm.models.loader import load_model

NAMES = ["reference", "invariant"] + (["cpu"] if cpu.why_not() is None else [])
CHECKPOINT = DictCheckpoint(LLAMA_CONFIG, llama_weights(LLAMA_CONFIG, 0))
ROWS = [list(range(1, 41)), list(range(90, 97)), list(range(200, 223))]
STEPS = [[30, 6, 0], [9, 1, 22], [1, 0, 1]]


def load(
    operators: str, dtype: torch.dtype, kv_dtype: torch.dtype, activations: Literal["auto", "float"] = "auto"
) -> Model:
    return load_model(CHECKPOINT, dtype, get_operators(operators, activations), kv_dtype=kv_dtype)


def test_records_have_scales() -> None:
    records = load("reference", torch.bfloat16, torch.int8).kv_spec(16).full_group().records
    assert [(record.name, record.shape, record.dtype) for record in records] == [
        ("k", (2, 16), "int8"),
        ("v", (2, 16), "int8"),
        ("k_scale", (2,), "float32"),
        ("v_scale", (2,), "float32"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_close_to_those_of_a_float_cache(name: str, dtype: torch.dtype) -> None:
    plain = run_rows(load("reference", torch.float32, torch.float32), ROWS, STEPS)
    for ours, expected in zip(run_rows(load(name, dtype, torch.int8), ROWS, STEPS), plain, strict=True):
        assert 0 < error(ours, expected) < (0.01 if dtype == torch.float32 else 0.1) * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_operators_agree(name: str) -> None:
    """Closer to each other than to a float cache: they quantise alike, as long as queries keep two bytes."""
    expected = run_rows(load("reference", torch.float32, torch.int8), ROWS, STEPS)
    model = load(name, torch.float32, torch.int8, "float")
    for ours, other in zip(run_rows(model, ROWS, STEPS), expected, strict=True):
        assert error(ours, other) < 2e-3 * other.abs().max()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_row_is_the_same_bits_in_any_schedule(name: str) -> None:
    model = load(name, torch.float32, torch.int8)
    for row, logits in zip(ROWS, run_rows(model, ROWS, STEPS, seed=1), strict=True):
        (alone,) = run_rows(model, [row], [[len(row)]])
        assert torch.equal(logits, alone)
