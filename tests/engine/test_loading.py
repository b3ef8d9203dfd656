"""What an engine is loaded as: the type it computes in, whose threads do it, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.cpu_kernels import need_instruction_set
from support.engines import make_engine
from support.tiny_models import write_tiny_llama

from kllm.engine.loading import Engine
from kllm.kernels.operators import DenseLayer, DenseShape, EmbeddingTable
from kllm.kernels.reference import ReferenceOperators
from kllm.models.weights import WeightError


@pytest.fixture(autouse=True)
def own_threads_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading sets torch's threads for the whole process, and keeps quantised weights for the next time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def half_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "half"
    return write_tiny_llama(folder, num_hidden_layers=1, torch_dtype="float16")


def cache_dtype(engine: Engine) -> torch.dtype:
    """The KV cache's type is that of the model."""
    engine.core.close()
    return engine.kv_cache["k"][0].dtype


@pytest.mark.parametrize("quantization", ["auto", "int8", "q8_0", "q4_0", "q4_1"])
def test_a_float16_checkpoint_is_computed_in_bfloat16_by_the_cpu_operators(
    half_model: Path, quantization: str, caplog: pytest.LogCaptureFixture
) -> None:
    need_instruction_set("avx2")
    with caplog.at_level(logging.WARNING, "kllm"):
        engine = make_engine(half_model, kernels="cpu", quantization=quantization, num_kv_blocks=8)
    assert cache_dtype(engine) == torch.bfloat16
    assert torch.get_num_threads() == 1
    assert [record.message for record in caplog.records if "float16" in record.message] == [
        "the checkpoint is float16, which the cpu operators do not have: computing in bfloat16"
    ]


def test_other_operators_keep_float16(half_model: Path) -> None:
    assert cache_dtype(make_engine(half_model, kernels="reference", num_kv_blocks=8)) == torch.float16


def test_float16_where_asked_for_has_all_threads_of_torch(half_model: Path) -> None:
    need_instruction_set("avx2")
    engine = make_engine(half_model, kernels="cpu", dtype="float16", threads=3, bind_threads=True, num_kv_blocks=8)
    assert cache_dtype(engine) == torch.float16
    assert torch.get_num_threads() == 3


def test_float16_with_quantised_weights_is_refused_before_they_are_quantised(half_model: Path, tmp_path: Path) -> None:
    need_instruction_set("avx2")
    with pytest.raises(ValueError, match="int8 weights in float16: choose --dtype bfloat16 or float32"):
        make_engine(half_model, kernels="cpu", dtype="float16", quantization="int8", num_kv_blocks=8)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": None}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": None}, torch.float32),
    ],
)
def test_the_type_that_a_config_names_in_its_way(tmp_path: Path, fields: dict[str, str], expected: torch.dtype) -> None:
    model = write_tiny_llama(tmp_path / "model", num_hidden_layers=1, **fields)
    assert cache_dtype(make_engine(model, kernels="reference", num_kv_blocks=8)) == expected


@pytest.mark.parametrize("name", ["auto", "int8", "nn", "float64", "", 16, ["float32"]])
def test_a_type_that_models_do_not_have_is_refused_unless_another_is_chosen(tmp_path: Path, name: object) -> None:
    model = write_tiny_llama(tmp_path / "model", num_hidden_layers=1, torch_dtype=name)
    with pytest.raises(WeightError) as caught:
        make_engine(model, kernels="reference", num_kv_blocks=8)
    assert f"{model / 'config.json'}: dtype {name!r} is not supported (only float32, bfloat16" in str(caught.value)
    chosen = make_engine(model, kernels="reference", dtype="float32", num_kv_blocks=8)
    assert cache_dtype(chosen) == torch.float32


@pytest.mark.parametrize(("options", "positions"), [({}, 512), ({"max_model_len": 100}, 100)])
def test_rotations_are_kept_for_no_more_positions_than_are_run(
    half_model: Path, options: dict[str, int], positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 262,144 positions would hold half a GiB of them in every instance while it loads."""
    kept: list[tuple[int, int]] = []

    def look(_: ReferenceOperators, shape: DenseShape, layers: Sequence[DenseLayer], embedding: EmbeddingTable) -> None:
        kept.append((shape.cos.shape[0], shape.sin.shape[0]))

    monkeypatch.setattr(ReferenceOperators, "dense_stack", look)
    make_engine(half_model, kernels="reference", num_kv_blocks=8, **options).core.close()
    assert kept == [(positions, positions)]


def test_a_length_beyond_the_model_is_still_refused(half_model: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len is 513, but the model was made for 512 tokens"):
        make_engine(half_model, kernels="reference", num_kv_blocks=8, max_model_len=513)
