"""Hardware and model presets: figures others state, and a source for each."""

from __future__ import annotations

import dataclasses

import pytest

from kllm.costs.errors import CostError, UnknownNameError
from kllm.costs.hardware import GIB, H100, H200, HARDWARE, THIS_MACHINE, Hardware, find_hardware
from kllm.costs.model_specs import (
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    GLM_5_2,
    KIMI_K2,
    LLAMA_70B,
    MODELS,
    SMOLLM2_135M,
    ModelSpec,
    find_model,
)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=str)
def test_every_figure_of_hardware_has_a_source(hardware: Hardware):
    figures = {field.name for field in dataclasses.fields(Hardware)}
    figures -= {"name", "processor", "sources", "uncertain"}
    given = {name for name in figures if getattr(hardware, name) is not None}
    assert given <= hardware.sources.keys() <= figures
    assert hardware.uncertain <= figures
    assert all(hardware.sources.values())


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_counted_parameters_are_those_stated(model: ModelSpec):
    assert model.source
    assert model.uncertain <= {field.name for field in dataclasses.fields(ModelSpec)}
    if model.quoted_total is not None:
        assert model.parameters / 1e9 == pytest.approx(model.quoted_total, rel=0.002)
    if model.quoted_active is not None:
        assert model.active_parameters / 1e9 == pytest.approx(model.quoted_active, rel=0.02)


def test_parameters_of_glm_by_kind():
    attention = GLM_5_2.attention
    index = 21 * (2048 * 32 * 128 + 6144 * (128 + 32))
    assert GLM_5_2.routed_parameters / 1e9 == pytest.approx(724.8, abs=0.05)
    assert (attention.sharded_parameters + attention.replicated_parameters - index) / 1e9 == pytest.approx(
        12.87, abs=0.005
    )
    assert GLM_5_2.shared_parameters / 1e9 == pytest.approx(2.83, abs=0.005)
    assert GLM_5_2.dense_parameters / 1e9 == pytest.approx(0.68, abs=0.005)
    assert GLM_5_2.vocabulary_parameters / 1e9 == pytest.approx(1.9, abs=0.005)


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        (SMOLLM2_135M, "bf16", 23_040),
        (SMOLLM2_135M, "int8", 12_240),
        (LLAMA_70B, "bf16", 327_680),
        (DEEPSEEK_V3, "bf16", 70_272),
        (DEEPSEEK_V3, "fp8", 40_016),
        (KIMI_K2, "bf16", 70_272),
        (KIMI_K2, "fp8", 40_016),
        (GLM_5_2, "bf16", 95_232),
        (GLM_5_2, "fp8", 78 * 656 + 21 * 132),
        (GLM_5_2.with_mtp(), "fp8", 54_728),
        (DEEPSEEK_V4_FLASH, "bf16", 6_880),
        (DEEPSEEK_V4_FLASH, "fp8", 3_850.25),
    ],
    ids=lambda value: value.name if isinstance(value, ModelSpec) else str(value),
)
def test_kv_bytes_per_token(model, dtype, expected):
    assert model.attention.kv_bytes(dtype) == expected


def test_sparse_attention_limits_are_in_tokens():
    assert (GLM_5_2.top_k, DEEPSEEK_V4_FLASH.top_k, LLAMA_70B.top_k, DEEPSEEK_V3.top_k) == (2048, 4 * 512, None, None)


def test_the_mtp_layer_is_one_moe_layer_more():
    more = GLM_5_2.with_mtp().parameters - GLM_5_2.parameters
    experts = 257 * 3 * 6144 * 2048 + 256 * 6144
    attention = GLM_5_2.attention
    one = attention.sharded_parameters // 78 + 6144 * (2048 + 576) + 2048 * 32 * 128 + 6144 * 160
    assert more == experts + one + 2 * 6144 * 6144


def test_models_without_an_mtp_layer_say_so():
    for model in (LLAMA_70B, KIMI_K2, DEEPSEEK_V4_FLASH, GLM_5_2.with_mtp()):
        with pytest.raises(CostError, match=f"{model.name} has no MTP layer"):
            model.with_mtp()


def test_names_and_aliases_are_found_whatever_their_case():
    assert find_model("GLM-5.2") is find_model("zai-org/glm-5.2") is GLM_5_2
    assert find_model("DeepSeek-R1") is DEEPSEEK_V3
    assert find_model("smollm2") is SMOLLM2_135M
    assert find_hardware("H200") is H200
    with pytest.raises(UnknownNameError, match=r"unknown model 'gpt-9': known are smollm2-135m, llama-70b, .*flash"):
        find_model("gpt-9")
    with pytest.raises(UnknownNameError, match=r"unknown hardware 'h900': known are h100, h200, .*this-machine"):
        find_hardware("h900")


def test_a_format_without_instructions_runs_in_the_next_one():
    assert H100.flops("fp4") == H100.flops("fp8") == 1978e12
    assert THIS_MACHINE.flops("fp8") == THIS_MACHINE.flops("bf16") == 0.461e12
    assert THIS_MACHINE.flops("fp4") == THIS_MACHINE.flops("int8") == 0.922e12


def test_usable_memory_is_nine_tenths_of_what_is_not_reserved():
    assert H200.usable_bytes == int(0.9 * (141 - 3.5) * GIB)
