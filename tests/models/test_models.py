"""Models without an oracle: invariance of whole models, and errors for configs and tensors that do not fit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_kernels import need_instruction_set
from support.reference_math import error
from support.running import DictCheckpoint, run_rows
from support.tiny_models import LLAMA_CONFIG, llama_weights

from kllm.kernels.registry import get_operators
from kllm.models.interface import Model
from kllm.models.layers.rotary import RotaryTable
from kllm.models.loader import load_model
from kllm.models.weights.interface import WeightError

LLAMA = {**LLAMA_CONFIG, "num_hidden_layers": 2}
DEEPSEEK: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0},
}


def deepseek_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 48),
        "model.norm.weight": (48,),
        "lm_head.weight": (64, 48),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        attention = {
            "q_a_proj": (20, 48),
            "q_a_layernorm": (20,),
            "q_b_proj": (60, 20),
            "kv_a_proj_with_mqa": (32, 48),
            "kv_a_layernorm": (24,),
            "kv_b_proj": (66, 24),
            "o_proj": (48, 30),
        }
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}{name}.weight": (48,) for name in ("input_layernorm", "post_attention_layernorm")}
        mlps = {"mlp.": 64} if layer == 0 else {f"mlp.experts.{e}.": 16 for e in range(8)} | {"mlp.shared_experts.": 16}
        for name, inner in mlps.items():
            shapes |= {f"{prefix}{name}{part}_proj.weight": (inner, 48) for part in ("gate", "up")}
            shapes[f"{prefix}{name}down_proj.weight"] = (48, inner)
    shapes |= {"model.layers.1.mlp.gate.weight": (8, 48), "model.layers.1.mlp.gate.e_score_correction_bias": (8,)}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def llama(**overrides: Any) -> DictCheckpoint:
    config = {**LLAMA, **overrides}
    return DictCheckpoint(config, llama_weights({**LLAMA, "tie_word_embeddings": config["tie_word_embeddings"]}, 0))


def deepseek(**overrides: Any) -> DictCheckpoint:
    return DictCheckpoint({**DEEPSEEK, **overrides}, deepseek_weights(DEEPSEEK))


MODELS = {"llama": llama(), "deepseek_v3": deepseek()}


def load(name: str, operators: str = "invariant", dtype: torch.dtype = torch.float32) -> Model:
    return load_model(MODELS[name], dtype, get_operators(operators))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    left, steps = list(lengths), []
    while any(left):
        counts = [draw(st.integers(0, n)) if n else 0 for n in left]
        if not any(counts):
            counts = list(left)
        left = [n - count for n, count in zip(left, counts, strict=True)]
        steps.append(counts)
    return lengths, steps


@pytest.mark.parametrize("name", MODELS)
@given(schedule=schedules(), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_invariant_models_give_the_same_bits_in_any_schedule(
    name: str, schedule: tuple[list[int], list[list[int]]], seed: int
) -> None:
    lengths, steps = schedule
    model = load(name)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths]
    mixed = run_rows(model, rows, steps, seed=seed)
    for row, logits in zip(rows, mixed, strict=True):
        (alone,) = run_rows(model, [row], [[len(row)]])
        assert torch.equal(logits, alone)


@pytest.mark.parametrize("name", MODELS)
def test_reference_agrees_with_invariant(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in (40, 7, 23)]
    steps = [[30, 6, 0], [9, 1, 22], [1, 0, 1]]
    for ours, other in zip(
        run_rows(load(name, "reference"), rows, steps), run_rows(load(name), rows, steps), strict=True
    ):
        assert error(ours, other) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_half_types_are_close_to_float32(name: str, dtype: torch.dtype) -> None:
    rows = [list(range(1, 40))]
    (half,) = run_rows(load(name, "reference", dtype), rows, [[20]] + [[1]] * 19)
    (full,) = run_rows(load(name, "reference"), rows, [[39]])
    assert half.dtype == torch.float32
    assert error(half, full) < 0.1 * full.abs().max()


def test_kv_specs_declare_what_is_kept() -> None:
    records = load("llama").kv_spec(16).full_group().records
    assert [(r.name, r.layers, r.shape, r.dtype, r.shard) for r in records] == [
        ("k", 2, (2, 16), "float32", "heads"),
        ("v", 2, (2, 16), "float32", "heads"),
    ]
    (latent,) = load("deepseek_v3", dtype=torch.bfloat16).kv_spec(32).full_group().records
    assert (latent.name, latent.layers, latent.shape, latent.dtype) == ("latent", 2, (32,), "bfloat16")


def test_model_says_its_limits_and_reports_progress() -> None:
    seen: list[float] = []
    model = load_model(MODELS["llama"], torch.float32, get_operators(), lambda _, share: seen.append(share))
    assert (model.vocab_size, model.max_model_len, model.dtype) == (288, 512, torch.float32)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("stated", "scaling", "length"),
    [
        (160, {"factor": 4.0, "original_max_position_embeddings": 128}, 512),  # Qwen3, as its authors say to extend it
        (512, {"factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (600, {"factor": 4.0, "original_max_position_embeddings": 128}, 600),
        (128, {"factor": 2.5}, 320),
        (512, {"original_max_position_embeddings": 128}, 512),
    ],
)
def test_yarn_makes_a_model_longer(stated: int, scaling: dict[str, Any], length: int) -> None:
    checkpoint = llama(max_position_embeddings=stated, rope_scaling={"rope_type": "yarn", **scaling})
    model = load_model(checkpoint, torch.float32, get_operators("reference"))
    assert model.max_model_len == length
    (logits,) = run_rows(model, [[7] * length], [[length]])  # every position can be computed
    assert logits.isfinite().all()


def test_the_length_that_is_stated_does_not_change_yarn() -> None:
    """Its frequencies come from the original length and the factor alone."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    checkpoints = [llama(max_position_embeddings=stated, rope_scaling=scaling) for stated in (160, 512)]
    models = [load_model(checkpoint, torch.float32, get_operators("reference")) for checkpoint in checkpoints]
    short, long = (run_rows(model, [list(range(150))], [[150]])[0] for model in models)
    assert torch.equal(short, long)


@pytest.mark.parametrize("name", MODELS)
def test_a_shorter_run_turns_by_the_same_angles(name: str) -> None:
    """YaRN's frequencies are those of the model's own length."""
    short = load_model(MODELS[name], torch.float32, get_operators("reference"), max_model_len=40)
    assert short.max_model_len == load(name, "reference").max_model_len
    row = list(range(40))
    ours, full = (run_rows(model, [row], [[40]])[0] for model in (short, load(name, "reference")))
    assert torch.equal(ours, full)


def test_the_rotations_are_not_held_twice() -> None:
    """The native layers have a copy of their own."""
    need_instruction_set("avx2")
    model = load_model(MODELS["llama"], torch.float32, get_operators("cpu"))
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held) is RotaryTable]
    assert run_rows(model, [[1, 2, 3]], [[3]])[0].isfinite().all()


def test_untied_head_is_read() -> None:
    checkpoint = llama(tie_word_embeddings=False)
    (untied,) = run_rows(load_model(checkpoint, torch.float32, get_operators()), [[1, 2, 3]], [[3]])
    (tied,) = run_rows(load("llama", "reference"), [[1, 2, 3]], [[3]])
    assert error(untied, tied) > 0.1


BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
    ("llama", {"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
    ("llama", {"architectures": None, "model_type": None}, "neither"),
    ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
    ("llama", {"hidden_size": -1}, "hidden_size must be an integer of at least 1, got -1"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("llama", {"vocab_size": None}, "vocab_size is missing"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads must divide"),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, "num_attention_heads must divide hidden_size"),
    ("llama", {"head_dim": 15}, "must be even"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"hidden_act": "gelu"}, "'gelu' is not supported"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 1e300}}, "factor 1e+300 makes the model longer"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ("llama", {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
    ("llama", {"intermediate_size": 256}, "gate_proj.weight has shape"),
    ("llama", {"attention_bias": True}, "q_proj.bias is missing"),
    ("deepseek_v3", {"n_group": 3}, "n_group must divide"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group must be at most"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "'softmax' is not supported"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), BAD_CONFIGS)
def test_bad_configs_are_named(name: str, overrides: dict[str, Any], message: str) -> None:
    checkpoint = llama(**overrides) if name == "llama" else deepseek(**overrides)
    with pytest.raises(WeightError) as caught:
        load_model(checkpoint, torch.float32, get_operators())
    assert message in str(caught.value)
