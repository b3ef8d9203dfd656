"""What names a model's KV in a shared store: any change that makes other KV makes another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kllm.config import EngineConfig
from kllm.engine.lower_tiers import identify

CONFIG = EngineConfig(model="m")
MODEL: dict[str, Any] = {"rope_theta": 1e4, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default"}}


def weights(folder: Path, size: int = 5 << 20) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(bytes(range(256)) * (size // 256))
    return path


def name(path: Path, model: dict[str, Any] = MODEL, config: EngineConfig = CONFIG) -> str:
    return identify([path], model, config, "reference")


def test_the_same_model_has_the_same_name(tmp_path: Path) -> None:
    path = weights(tmp_path)
    assert name(path) == name(path, dict(reversed(MODEL.items())))


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {"rms_norm_eps": 1e-6}]
)
def test_another_configuration_is_another_model(tmp_path: Path, change: dict[str, Any]) -> None:
    path = weights(tmp_path)
    assert name(path, MODEL | change) != name(path)


@pytest.mark.parametrize("start", [0, 1 << 20, 5 << 19, (5 << 20) - 1])
def test_weights_that_differ_by_a_tensor_are_another_model(tmp_path: Path, start: int) -> None:
    """A tensor that a fine-tune changed, of a MiB or to the file's end, wherever it lies."""
    path = weights(tmp_path)
    before, data = name(path), bytearray(path.read_bytes())
    part = data[start : start + (1 << 20)]
    data[start : start + len(part)] = bytes(255 - byte for byte in part)
    path.write_bytes(data)
    assert name(path) != before


def test_of_a_large_file_little_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert len(name(path)) == 32


def test_numerics_are_part_of_the_name(tmp_path: Path) -> None:
    path = weights(tmp_path)
    assert name(path, config=EngineConfig(model="m", kv_cache_dtype="int8")) != name(path)
