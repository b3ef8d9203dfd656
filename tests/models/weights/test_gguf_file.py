from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.tiny_gguf import tiny_gguf_tensors, write_tiny_gguf
from support.tiny_models import LLAMA_CONFIG, llama_weights

from kllm.hub.source import ModelSource
from kllm.models.weights import WeightError, open_checkpoint

WEIGHTS = llama_weights(LLAMA_CONFIG, 0)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def opened(path: Path):
    return open_checkpoint(ModelSource(str(path), "gguf", path))


def test_float32_file_gives_the_original_weights(tmp_path):
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf"))
    assert set(checkpoint.names()) == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert torch.equal(checkpoint.get(name, tuple(weight.shape), torch.float32), weight), name


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_query_and_key_rows_are_put_back_in_order_in_every_type(tmp_path, quant):
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", quant))
    for name in (Q_PROJ, Q_PROJ.replace("q_proj", "k_proj"), Q_PROJ.replace("q_proj", "v_proj")):
        kind = gguf.GGMLQuantizationType[quant]
        expected = gguf.quants.dequantize(gguf.quants.quantize(WEIGHTS[name].numpy(), kind), kind)
        got = checkpoint.get(name, tuple(WEIGHTS[name].shape), torch.float32)
        assert torch.equal(got, torch.from_numpy(expected)), name


def test_metadata_becomes_a_config(tmp_path):
    config = opened(write_tiny_gguf(tmp_path / "m.gguf")).config
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("model_type", "architectures", "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    assert {key: config[key] for key in same} == {key: LLAMA_CONFIG[key] for key in same}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


def test_untied_embeddings_and_biases_are_noticed(tmp_path):
    extra = {
        "output.weight": (WEIGHTS["model.embed_tokens.weight"].numpy(), "F32"),
        "blk.0.attn_q.bias": (np.arange(64, dtype=np.float32), "F32"),
    }
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", tensors=extra))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    bias = checkpoint.get("model.layers.0.self_attn.q_proj.bias", (64,), torch.float32)
    assert bias[:4].tolist() == [0, 2, 4, 6]  # rows 0, d/2, 1, d/2 + 1 were neighbours in the file


def test_qwen3_rows_stay_as_they_are(tmp_path):
    metadata = {"qwen3.attention.key_length": 16}
    norm = (np.ones(16, dtype=np.float32), "F32")
    path = write_tiny_gguf(
        tmp_path / "m.gguf", arch="qwen3", metadata=metadata, tensors={"blk.0.attn_q_norm.weight": norm}
    )
    checkpoint = opened(path)
    stored = torch.from_numpy(tiny_gguf_tensors()["blk.1.attn_q.weight"][0])
    assert torch.equal(checkpoint.get(Q_PROJ, (64, 64), torch.float32), stored)
    assert "model.layers.0.self_attn.q_norm.weight" in checkpoint.names()


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What each frequency is divided by, from the definition of Llama 3's scaling."""
    frequency = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 2048, 1, np.where(wavelength > 8192, factor, middle)).astype(np.float32)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    divisors = (llama3_divisors(500000.0, 16, 32.0), "F32")
    path = write_tiny_gguf(
        tmp_path / "m.gguf", metadata={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": divisors}
    )
    assert opened(path).config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "linear"}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={**metadata, "llama.rope.scaling.factor": 4.0})
    assert opened(path).config["rope_parameters"] == expected


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 128,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.factor": 4.0}, LINEAR_ROPE),
        ({"llama.rope.scale_linear": 4.0}, LINEAR_ROPE),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 4.0}, LINEAR_ROPE),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, LINEAR_ROPE),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, DEFAULT_ROPE),
        ({"llama.rope.scaling.factor": 1.0}, DEFAULT_ROPE),
        ({"llama.rope.scale_linear": 0.0}, DEFAULT_ROPE),
        ({"llama.rope.scaling.attn_factor": 1.0}, DEFAULT_ROPE),
    ],
)
def test_a_factor_without_a_type_scales_linearly_as_in_llama_cpp(tmp_path, metadata, expected):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert opened(path).config["rope_parameters"] == expected


def test_settings_of_yarn_are_read_and_those_that_change_nothing_are_passed_over(tmp_path):
    prefix = "llama.rope.scaling."
    neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0, "yarn_ext_factor": -1.0}
    given = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 0.1, **neutral}
    metadata = {**YARN, **{prefix + key: value for key, value in given.items()}}
    rope = opened(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).config["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (4.0, 128)
    assert (rope["beta_fast"], rope["beta_slow"]) == (16.0, 0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_factor", 0.5), ("yarn_attn_factor", 0.5), ("yarn_log_multiplier", 0.1), ("yarn_ext_factor", 0.0)],
)
def test_settings_of_yarn_that_would_change_the_rotation_are_refused(tmp_path, key, value):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={**YARN, f"llama.rope.scaling.{key}": value})
    with pytest.raises(WeightError, match=rf"rope\.scaling\.{key} is {value:g}, which is not supported"):
        opened(path)


BIAS_OF_ATTENTION = (np.zeros(64, dtype=np.float32), "F32")
BIAS_OF_MLP = (np.zeros(128, dtype=np.float32), "F32")


@pytest.mark.parametrize("name", ["attn_output", "attn_k", "ffn_down", "attn_norm"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_bias_that_would_not_be_read_is_refused(tmp_path, layer, name):
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors={f"blk.{layer}.{name}.bias": BIAS_OF_ATTENTION})
    with pytest.raises(WeightError, match=rf"bias blk\.{layer}\.{name}\.bias is not supported"):
        opened(path)


def test_biases_of_one_half_do_not_pass_for_those_of_the_other(tmp_path):
    tensors = {"blk.0.attn_q.bias": BIAS_OF_ATTENTION, "blk.0.ffn_down.bias": BIAS_OF_ATTENTION}
    with pytest.raises(WeightError, match=r"ffn_down\.bias is not supported"):
        opened(write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_biases_of_all_mlp_matrices_are_told_of_where_the_model_has_them(tmp_path):
    tensors = {f"blk.0.ffn_{part}.bias": BIAS_OF_MLP for part in ("gate", "up")}
    tensors["blk.0.ffn_down.bias"] = BIAS_OF_ATTENTION
    assert opened(write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)).config["mlp_bias"] is True
    with pytest.raises(WeightError, match=r"ffn_gate\.bias is not supported"):  # a qwen3 has none
        opened(write_tiny_gguf(tmp_path / "q.gguf", arch="qwen3", tensors=tensors))


WRONG_FILES = {
    "a factor of the amplitude": ({"metadata": {"llama.rope.scaling.attn_factor": 2.0}}, "attn_factor is 2"),
    "yarn without a factor": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "'yarn' without a factor"),
    "two scalings": (
        {
            "metadata": {"llama.rope.scaling.factor": 2.0},
            "tensors": {"rope_freqs.weight": (np.ones(8, dtype=np.float32), "F32")},
        },
        "'linear' on top of rope_freqs.weight",
    ),
    "unknown architecture": ({"arch": "mamba"}, "unknown architecture 'mamba'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "experts"),
    "part of a split file": ({"metadata": {"split.count": 3}}, "split GGUF"),
    "partial rotary": ({"metadata": {"llama.rope.dimension_count": 8}}, "RoPE over 8 of 16"),
    "zero layers": ({"metadata": {"llama.block_count": 0}}, "llama.block_count is 0"),
    "wrong metadata type": ({"metadata": {"llama.block_count": "four"}}, "llama.block_count is 'four', expected int"),
    "unknown rope scaling": ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, "token_embd.weight is missing"),
    "unknown tensor": (
        {"tensors": {"blk.0.ssm_a.weight": (np.zeros(4, dtype=np.float32), "F32")}},
        "blk.0.ssm_a.weight is not part of architecture llama",
    ),
    "foreign rope divisors": (
        {"tensors": {"rope_freqs.weight": (np.linspace(1, 9, 8).astype(np.float32), "F32")}},
        "rope_freqs.weight is not Llama 3's scaling",
    ),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_file_is_refused_by_name(tmp_path, case):
    arguments, message = WRONG_FILES[case]
    path = write_tiny_gguf(tmp_path / "model.gguf", **arguments)
    with pytest.raises(WeightError) as error:
        opened(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (Q_PROJ, (64, 32), f"tensor {Q_PROJ} (blk.1.attn_q.weight) has shape [64, 64], expected [64, 32]"),
        (
            "model.layers.9.self_attn.q_proj.weight",
            (64, 64),
            "tensor model.layers.9.self_attn.q_proj.weight is missing",
        ),
    ],
)
def test_missing_tensor_and_wrong_shape_are_named(tmp_path, name, shape, message):
    path = write_tiny_gguf(tmp_path / "model.gguf")
    with pytest.raises(WeightError) as error:
        opened(path).get(name, shape, torch.float32)
    assert str(error.value) == f"{path}: {message}"


def test_rows_that_do_not_fill_heads_are_refused(tmp_path):
    odd = (np.zeros((30, 64), dtype=np.float32), "F32")
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", tensors={"blk.1.attn_q.weight": odd}))
    with pytest.raises(WeightError, match=r"blk\.1\.attn_q\.weight has 30 rows for 4 heads"):
        checkpoint.get(Q_PROJ, (30, 64), torch.float32)


def test_truncation_anywhere_is_an_error_that_names_the_file(tmp_path):
    whole = write_tiny_gguf(tmp_path / "whole.gguf", "Q4_0").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 23, 24, 100, *range(200, len(whole), len(whole) // 60), len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightError) as error:
            opened(cut)
        assert str(cut) in str(error.value), size


def test_damaged_headers_never_crash_or_eat_memory(tmp_path):
    """Bytes of the fixed header and of the first keys overwritten with extremes: an error or a readable file."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "Q4_0")
    whole = path.read_bytes()
    refused = []
    tracemalloc.start()
    for position in [*range(32), *range(32, 600, 5)]:
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                opened(path)
            except WeightError as error:
                refused.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(refused) > 100
    assert all(message.startswith(f"{path}: ") for message in refused)
    assert peak < 64 << 20


def test_version_1_and_big_endian_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(WeightError, match="version"):
            opened(path)
