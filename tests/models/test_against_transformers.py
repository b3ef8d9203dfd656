"""Logits of tiny random models against transformers: every architecture, chunked and not, every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cpu_kernels import INSTRUCTION_SETS, need_instruction_set
from support.reference_math import error
from support.running import run_rows

from kllm.hub.source import ModelSource
from kllm.kernels.registry import get_operators, use_machine
from kllm.models import deepseek_v3
from kllm.models.layers.tensors import TensorReader
from kllm.models.loader import load_model
from kllm.models.model_config import ModelConfig
from kllm.models.weights import open_checkpoint

pytestmark = pytest.mark.oracle

NAMES = ["llama", "llama-llama3-biases", "llama-linear", "qwen3", "qwen3-yarn", "deepseek_v3", "deepseek_v3-plain"]
TOKENS = 70
SPLITS = {"whole": [70], "uneven": [1, 16, 3, 33, 17], "halves": [35, 35], "decode": [60] + [1] * 10}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models_folder(transformers_reference: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracle")
    transformers_reference("tiny", ",".join(NAMES), folder)
    return folder


def reference(folder: Path) -> tuple[list[int], torch.Tensor]:
    expected = load_file(folder / "logits.bin")
    assert expected["logits"].std() > 0.3  # else nearly everything would agree
    return expected["tokens"].tolist(), expected["logits"]


@pytest.mark.parametrize("operators", ["reference", "invariant", *INSTRUCTION_SETS])
@pytest.mark.parametrize("name", NAMES)
def test_logits(models_folder: Path, name: str, operators: str) -> None:
    folder = models_folder / name
    tokens, expected = reference(folder)
    checkpoint = open_checkpoint(ModelSource(name, "folder", folder))
    if operators in INSTRUCTION_SETS:
        need_instruction_set(operators)
        use_machine(2, operators)
        operators = "cpu"
    model = load_model(checkpoint, torch.float32, get_operators(operators))
    for split, counts in SPLITS.items():
        (logits,) = run_rows(model, [tokens], [[count] for count in counts])
        assert error(logits, expected) < TOLERANCE, split


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-plain"])
def test_forced_forms(models_folder: Path, name: str, form: Any) -> None:
    folder = models_folder / name
    tokens, expected = reference(folder)
    checkpoint = open_checkpoint(ModelSource(name, "folder", folder))
    reader = TensorReader(checkpoint, torch.float32, get_operators("reference"))
    model = deepseek_v3.load(ModelConfig(checkpoint.config), reader, mla_form=form)
    for split, counts in SPLITS.items():
        (logits,) = run_rows(model, [tokens], [[count] for count in counts])
        assert error(logits, expected) < TOLERANCE, split
