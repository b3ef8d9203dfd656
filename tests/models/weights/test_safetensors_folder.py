from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import LLAMA_CONFIG, llama_weights

from kllm.hub.source import ModelSource
from kllm.models.weights import WeightError, open_checkpoint

WEIGHTS = llama_weights(LLAMA_CONFIG, 0)
NAME = "model.layers.2.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The tiny llama in two shards."""
    names = sorted(WEIGHTS)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: WEIGHTS[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in halves.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def opened(folder: Path):
    return open_checkpoint(ModelSource("tiny", "folder", folder))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def assert_whole(folder: Path) -> None:
    checkpoint = opened(folder)
    assert set(checkpoint.names()) == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert torch.equal(checkpoint.get(name, tuple(weight.shape), torch.float32), weight), name


def test_one_file(folder):
    assert_whole(folder)


def test_shards(sharded):
    assert_whole(sharded)


def test_shards_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert_whole(sharded)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_converted_and_in_memory_of_their_own(folder, stored, wanted):
    path = folder / "model.safetensors"
    save_file({name: weight.to(stored) for name, weight in WEIGHTS.items()}, path)
    before = path.read_bytes()
    checkpoint = opened(folder)
    shape = tuple(WEIGHTS[NAME].shape)
    tensor = checkpoint.get(NAME, shape, wanted)
    assert torch.equal(tensor, WEIGHTS[NAME].to(stored).to(wanted))
    tensor.zero_()
    assert torch.equal(checkpoint.get(NAME, shape, wanted), WEIGHTS[NAME].to(stored).to(wanted))
    assert path.read_bytes() == before


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_file_pages_are_let_go_while_loading(folder):
    big = {f"big.{index}": torch.zeros(4 << 20) for index in range(16)}  # 256 MiB
    save_file(big, folder / "model.safetensors")
    checkpoint = opened(folder)
    before = resident_file_bytes()
    for name in checkpoint.names():
        checkpoint.get(name, (4 << 20,), torch.bfloat16)
    assert resident_file_bytes() - before < 100 << 20


ROPES = {
    "legacy default": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "nothing said": ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    "legacy type": (
        {"rope_theta": 100, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    ),
    "legacy llama3": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "new style": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 7.0,
                "factor": 4,
                "original_max_position_embeddings": 9,
            }
        },
        {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4, "original_max_position_embeddings": 9},
    ),
    "per kind of layer": (
        {"rope_parameters": {"full": {"rope_type": "default", "rope_theta": 3.0}, "slide": {"rope_theta": 4.0}}},
        {"full": {"rope_type": "default", "rope_theta": 3.0}, "slide": {"rope_type": "default", "rope_theta": 4.0}},
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_old_and_new_rope_settings_take_one_form(folder, case):
    changes, expected = ROPES[case]
    change_config(folder, **changes)
    config = opened(folder).config
    assert config["rope_parameters"] == expected
    assert "rope_theta" not in config
    assert "rope_scaling" not in config


def test_torch_dtype_becomes_dtype(folder):
    config = opened(folder).config
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config


def break_index(content: str):
    return lambda folder: (folder / INDEX).write_text(content)


def truncate(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def drop_tensor(folder: Path) -> None:
    kept = load_file(folder / "b.safetensors")
    del kept[sorted(WEIGHTS)[1]]
    save_file(kept, folder / "b.safetensors")


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{,"), "config.json: not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: must hold a JSON object"),
    "config is nested too deep": (
        lambda f: (f / "config.json").write_text("[" * 100000),
        "config.json: not valid JSON",
    ),
    "config of bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: not valid JSON"),
    "no model_type": (lambda f: (f / "config.json").write_text("{}"), "config.json: has no model_type"),
    "rope of the wrong type": (lambda f: change_config(f, rope_theta="many"), "config.json: invalid RoPE"),
    "rope parameters a list": (lambda f: change_config(f, rope_parameters=[1]), "config.json: invalid RoPE"),
    "quantised": (lambda f: change_config(f, quantization_config={"quant_method": "gptq"}), "config.json: quantised"),
    "index is no JSON": (break_index("nonsense"), f"{INDEX}: not a valid index"),
    "index without a map": (break_index('{"metadata": {}}'), f"{INDEX}: not a valid index"),
    "index maps to a list": (break_index('{"weight_map": [1]}'), f"{INDEX}: not a valid index"),
    "index points outside": (
        break_index('{"weight_map": {"x": "../a.safetensors"}}'),
        "names a file outside the folder",
    ),
    "missing shard": (lambda f: (f / "b.safetensors").unlink(), "b.safetensors: missing"),
    "tensor not in its shard": (drop_tensor, "b.safetensors: tensor"),
    "empty shard": (truncate("a.safetensors", 0), "a.safetensors: truncated or damaged"),
    "shard cut in the header": (truncate("a.safetensors", 50), "a.safetensors: truncated or damaged"),
    "shard cut in the data": (truncate("a.safetensors", 9000), "a.safetensors: truncated or damaged"),
    "shard of noise": (
        lambda f: (f / "a.safetensors").write_bytes(b"\xff" * 999),
        "a.safetensors: truncated or damaged",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_refused_by_name(sharded, case):
    damage, message = BROKEN[case]
    damage(sharded)
    with pytest.raises(WeightError) as error:
        opened(sharded)
    assert str(sharded) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (NAME, (128, 65), f"model.safetensors: tensor {NAME} has shape [128, 64], expected [128, 65]"),
        (NAME, (8192,), "has shape [128, 64], expected [8192]"),
        ("lm_head.weight", (288, 64), "model.safetensors: tensor lm_head.weight is missing"),
    ],
)
def test_missing_tensor_and_wrong_shape_are_named(folder, name, shape, message):
    with pytest.raises(WeightError) as error:
        opened(folder).get(name, shape, torch.float32)
    assert message in str(error.value)


def test_integer_tensor_is_refused(folder):
    save_file({NAME: torch.zeros(2, 2, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"up_proj\.weight has type I32"):
        opened(folder).get(NAME, (2, 2), torch.float32)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        opened(folder)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"has no \*\.safetensors files"):
        opened(folder)
