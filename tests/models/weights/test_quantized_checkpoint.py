from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.reference_math import error
from support.running import DictCheckpoint, run_rows
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import LLAMA_CONFIG, llama_weights

from kllm.hub.source import ModelSource
from kllm.kernels import cpu
from kllm.kernels.registry import get_operators
from kllm.models.loader import load_model
from kllm.models.weights import WeightError, open_checkpoint, quantized_file
from kllm.models.weights.quantized_checkpoint import QuantizedCheckpoint, format_of, is_linear
from kllm.models.weights.safetensors_folder import SafetensorsFolder
from kllm.quantization.matrices import FORMATS, dequantize, quantize

WEIGHTS = llama_weights(LLAMA_CONFIG, 0)
LINEAR = [name for name, weight in WEIGHTS.items() if weight.dim() == 2]
NAME = "model.layers.2.mlp.up_proj.weight"


class CountingFolder(SafetensorsFolder):
    """Remembers which tensors were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, json.loads((folder / "config.json").read_text()))
        self.read: list[str] = []

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.read.append(name)
        return super().get(name, shape, dtype)


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "tiny"))


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


def assert_quantized(checkpoint: QuantizedCheckpoint, format: str) -> None:
    """Every matrix is the quantised weight, whichever way it is asked for; the rest are the weights themselves."""
    assert set(checkpoint.names()) == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        shape = tuple(weight.shape)
        assert checkpoint.shape(name) == shape
        if name not in LINEAR:
            assert torch.equal(checkpoint.get(name, shape, torch.float32), weight)
            continue
        expected = quantize(weight, format_of(name, shape[1], format))
        matrix = checkpoint.get_quantized(name, shape)
        assert matrix is not None
        assert (matrix.format, matrix.rows, matrix.cols) == (expected.format, *shape)
        assert torch.equal(matrix.data, expected.data)
        if expected.scales is not None:
            assert torch.equal(matrix.scales, expected.scales)
        assert torch.equal(checkpoint.get(name, shape, torch.bfloat16), dequantize(expected, torch.bfloat16))


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_cache(folder: Path, format: str) -> None:
    assert_quantized(QuantizedCheckpoint(CountingFolder(folder), format, None), format)


@pytest.mark.parametrize("format", FORMATS)
def test_only_the_first_start_quantises(folder: Path, tmp_path: Path, format: str) -> None:
    cache = tmp_path / "deep" / "cache"
    first, seen = CountingFolder(folder), []
    checkpoint = QuantizedCheckpoint(first, format, cache, lambda phase, share: seen.append((phase, share)))
    assert sorted(first.read) == sorted(LINEAR)
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {phase for phase, _ in seen} == {"quantise weights"}
    assert_quantized(checkpoint, format)

    second, seen = CountingFolder(folder), []
    checkpoint = QuantizedCheckpoint(second, format, cache, lambda phase, share: seen.append((phase, share)))
    assert_quantized(checkpoint, format)
    assert not set(second.read) & set(LINEAR)
    assert seen == []
    assert len(kept(cache)) == 1
    assert kept(cache)[0].name.startswith(f"tiny-{format}-")
    with_scales = [name for name in LINEAR if format_of(name, WEIGHTS[name].shape[1], format) == "int8"]
    assert len(load_file(kept(cache)[0])) == len(LINEAR) + len(with_scales)
    assert list(cache.glob("*.partial")) == []


def test_formats_do_not_share_a_file(folder: Path, tmp_path: Path) -> None:
    for format in FORMATS:
        QuantizedCheckpoint(CountingFolder(folder), format, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == len(FORMATS)


def test_matrices_outlive_the_mapping(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_file, "_REOPEN_BYTES", 1)
    checkpoint = QuantizedCheckpoint(CountingFolder(folder), "q4_0", tmp_path / "cache")
    matrices = [checkpoint.get_quantized(name, tuple(WEIGHTS[name].shape)) for name in LINEAR]
    for name, matrix in zip(LINEAR, matrices, strict=True):
        assert matrix is not None
        assert torch.equal(matrix.data, quantize(WEIGHTS[name], "q4_0").data)


@pytest.mark.parametrize("damage", ["cut", "emptied", "header cut", "foreign", "of another format", "without scales"])
def test_a_damaged_file_is_replaced(
    folder: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    QuantizedCheckpoint(CountingFolder(folder), "int8", cache)
    (path,) = kept(cache)
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8 : 8 + size])["__metadata__"]
    if damage == "foreign":
        save_file({NAME: torch.zeros(128, 64, dtype=torch.int8)}, path)
    elif damage == "of another format":
        save_file({NAME: torch.zeros(128, 64)}, path, metadata=metadata)
    elif damage == "without scales":
        save_file({NAME: torch.zeros(128, 64, dtype=torch.int8)}, path, metadata=metadata)
    else:
        path.write_bytes(whole[: {"cut": len(whole) - 1, "emptied": 0, "header cut": size // 2}[damage]])
    with caplog.at_level(logging.WARNING):
        again = QuantizedCheckpoint(CountingFolder(folder), "int8", cache)
    assert "will be written anew" in caplog.text
    assert_quantized(again, "int8")
    assert path.read_bytes() == whole


def test_changed_weights_are_quantised_anew(folder: Path, tmp_path: Path) -> None:
    """Even where size and time stay the same, as in an image whose files all have one time."""
    path, cache = folder / "model.safetensors", tmp_path / "cache"
    QuantizedCheckpoint(CountingFolder(folder), "int8", cache)
    (old,) = kept(cache)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    other = {name: weight * 2 for name, weight in WEIGHTS.items()}
    save_file(other, path, metadata={"format": "pt"})
    os.utime(path, ns=times)
    matrix = QuantizedCheckpoint(CountingFolder(folder), "int8", cache).get_quantized(NAME, (128, 64))
    assert matrix is not None
    assert torch.equal(matrix.scales, quantize(other[NAME], "int8").scales)
    assert old not in kept(cache)
    assert len(kept(cache)) == 1


def test_processes_that_start_together_share_the_work(folder: Path, tmp_path: Path) -> None:
    sources = [CountingFolder(folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda source: QuantizedCheckpoint(source, "q8_0", tmp_path / "cache"), sources))
    assert sorted(name for source in sources for name in source.read) == sorted(LINEAR)
    for checkpoint in made:
        assert_quantized(checkpoint, "q8_0")


def test_a_folder_that_cannot_be_made_is_only_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        checkpoint = QuantizedCheckpoint(CountingFolder(folder), "q4_1", tmp_path / "file" / "cache")
    assert "cannot be kept" in caplog.text
    assert_quantized(checkpoint, "q4_1")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 100,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_only_a_warning(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    with caplog.at_level(logging.WARNING), full_disk():
        checkpoint = QuantizedCheckpoint(CountingFolder(folder), "int8", cache)
    assert "cannot be kept" in caplog.text
    assert list(cache.glob("*.partial")) == kept(cache) == []
    assert_quantized(checkpoint, "int8")


def open_gguf(path: Path):
    return open_checkpoint(ModelSource("tiny", "gguf", path))


@pytest.mark.parametrize("cached", [True, False])
def test_blocks_shipped_in_the_very_format_are_passed_on(tmp_path: Path, cached: bool) -> None:
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "Q4_1"))
    for _ in range(2):
        checkpoint = QuantizedCheckpoint(source, "q4_1", tmp_path / "cache" if cached else None)
        for name in LINEAR:
            shape = tuple(WEIGHTS[name].shape)
            ours, theirs = checkpoint.get_quantized(name, shape), source.get_quantized(name, shape)
            assert ours is not None
            assert torch.equal(ours.data, theirs.data)
            assert torch.equal(checkpoint.get(name, shape, torch.float32), source.get(name, shape, torch.float32))
    assert [len(load_file(path)) for path in kept(tmp_path / "cache")] == ([0] if cached else [])


def test_blocks_of_another_format_are_converted(tmp_path: Path) -> None:
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "Q4_0"))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        matrix = QuantizedCheckpoint(source, "int8", cache).get_quantized(NAME, (128, 64))
        expected = quantize(source.get(NAME, (128, 64), torch.float32), "int8")
        assert matrix is not None
        assert torch.equal(matrix.data, expected.data)
        assert torch.equal(matrix.scales, expected.scales)


def test_what_is_never_quantised() -> None:
    assert is_linear("model.layers.3.mlp.gate_proj.weight", (8, 8))
    assert is_linear("lm_head.weight", (8, 8))
    assert not is_linear("model.layers.3.mlp.gate.weight", (8, 8))
    assert not is_linear("model.layers.3.self_attn.kv_b_proj.weight", (8, 8))
    assert not is_linear("model.norm.weight", (8,))
    assert not is_linear("model.layers.3.self_attn.q_proj.bias", (8,))


def test_int8_gives_the_head_finer_scales() -> None:
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert [format_of(name, 64, format) for format in FORMATS] == ["q8_0", "q8_0", "q4_0", "q4_1"]
        assert format_of(name, 48, "int8") == "int8"  # no whole blocks
    assert [format_of(NAME, 64, format) for format in FORMATS] == list(FORMATS)


def test_rows_that_are_no_whole_blocks_stay_floats() -> None:
    tensors = {"a.weight": torch.randn(4, 48), "b.weight": torch.randn(4, 64)}
    checkpoint = QuantizedCheckpoint(DictCheckpoint({}, tensors), "q8_0", None)
    assert checkpoint.get_quantized("a.weight", (4, 48)) is None
    assert torch.equal(checkpoint.get("a.weight", (4, 48), torch.float32), tensors["a.weight"])
    assert checkpoint.get_quantized("b.weight", (4, 64)) is not None


@pytest.mark.parametrize("cached", [True, False])
def test_weights_that_are_not_finite_are_named(folder: Path, tmp_path: Path, cached: bool) -> None:
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    weights[NAME][5, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=f"{NAME} cannot be quantised to q4_0: values that are not finite"):
        QuantizedCheckpoint(CountingFolder(folder), "q4_0", tmp_path / "cache" if cached else None).get(
            NAME, (128, 64), torch.float32
        )
    assert kept(tmp_path / "cache") == list(tmp_path.glob("cache/*.partial")) == []


def test_errors_are_those_of_the_checkpoint(folder: Path) -> None:
    checkpoint = QuantizedCheckpoint(CountingFolder(folder), "int8", None)
    assert checkpoint.get_quantized(NAME, (64, 64)) is None
    with pytest.raises(WeightError, match=r"expected \[64, 64\]"):
        checkpoint.get(NAME, (64, 64), torch.float32)
    with pytest.raises(WeightError, match="nothing is missing"):
        checkpoint.get("nothing", (64, 64), torch.float32)
    with pytest.raises(ValueError, match="'int3': choose from int8, q8_0"):
        QuantizedCheckpoint(CountingFolder(folder), "int3", None)


@pytest.mark.parametrize(("format", "most"), [("int8", 0.03), ("q8_0", 0.03), ("q4_0", 0.4), ("q4_1", 0.4)])
def test_a_model_computes_with_them(folder: Path, tmp_path: Path, format: str, most: float) -> None:
    source, rows = CountingFolder(folder), [list(range(1, 40))]
    (plain,) = run_rows(load_model(source, torch.float32, get_operators("reference")), rows, [[39]])
    checkpoint = QuantizedCheckpoint(source, format, tmp_path / "cache")
    (ours,) = run_rows(load_model(checkpoint, torch.float32, get_operators("reference")), rows, [[39]])
    assert 0 < error(ours, plain) < most * plain.abs().max()


@pytest.mark.skipif(cpu.why_not() is not None, reason="the native operators cannot run here")
@pytest.mark.parametrize("format", FORMATS)
def test_operators_with_and_without_packed_formats_compute_the_same(folder: Path, tmp_path: Path, format: str) -> None:
    checkpoint = QuantizedCheckpoint(CountingFolder(folder), format, tmp_path / "cache")
    rows = [list(range(1, 40))]
    (floats,) = run_rows(load_model(checkpoint, torch.float32, get_operators("reference")), rows, [[39]])
    packed = load_model(checkpoint, torch.float32, get_operators("cpu", "float"), keep_quantized=True)
    (ours,) = run_rows(packed, rows, [[39]])
    assert error(ours, floats) < 1e-4
