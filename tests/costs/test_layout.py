from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.costs.errors import CostError
from kllm.costs.hardware import B200, H200, THIS_MACHINE
from kllm.costs.layout import Layout, layouts_of, parse_layout
from kllm.costs.model_specs import DEEPSEEK_V3, GLM_5_2, KIMI_K2, LLAMA_70B, SMOLLM2_135M


@pytest.mark.parametrize(
    ("text", "layout", "gpus"),
    [
        ("tp1", Layout(), 1),
        ("tp8", Layout(tp=8), 8),
        ("TP4", Layout(tp=4), 4),
        ("tp8ep8", Layout(tp=8, ep=8), 8),
        ("dp8ep8", Layout(dp=8, ep=8), 8),
        ("dp2tp4ep8", Layout(tp=4, dp=2, ep=8), 8),
        ("tp4dp2ep8", Layout(tp=4, dp=2, ep=8), 8),
    ],
)
def test_parsing(text, layout, gpus):
    assert parse_layout(text) == layout
    assert layout.gpus == gpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not of the form"),
        ("8", "not of the form"),
        ("tp", "not of the form"),
        ("tp0", "not of the form"),
        ("tp99999999999999", "not of the form"),
        ("tp8tp8", "not of the form"),
        ("tp8x", "not of the form"),
        ("zz8", "not of the form"),
        ("tp8pp2", "pipeline parallelism is not modelled"),
        ("cp4", "context parallelism is not modelled"),
        ("dp8", "dp needs ep8"),
        ("tp8ep4", "ep must be 8"),
        ("ep8", "ep must be 1"),
    ],
)
def test_what_is_not_a_layout_is_refused(text, message):
    with pytest.raises(CostError, match=message):
        parse_layout(text)


@given(st.text(max_size=12))
def test_any_text_is_a_layout_that_reads_the_same_again_or_an_error(text):
    try:
        layout = parse_layout(text)
    except CostError:
        return
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "model", "hardware", "message"),
    [
        (Layout(tp=2), SMOLLM2_135M, H200, "9 heads"),
        (Layout(tp=9), SMOLLM2_135M, H200, "node of 8"),
        (Layout(tp=16), LLAMA_70B, H200, "node of 8"),
        (Layout(dp=2, ep=2), LLAMA_70B, H200, "no experts"),
        (Layout(dp=3, ep=3), GLM_5_2, H200, "256 experts"),
        (Layout(tp=2), LLAMA_70B, THIS_MACHINE, "node of 1"),
        (Layout(dp=2, ep=2), GLM_5_2, THIS_MACHINE, "one machine"),
    ],
)
def test_what_does_not_suit_the_model_or_the_hardware_is_refused(layout, model, hardware, message):
    with pytest.raises(CostError, match=message):
        layout.check(model, hardware)


def test_layouts_of_a_number_of_gpus():
    assert [str(layout) for layout in layouts_of(8, GLM_5_2, H200)] == ["tp8", "dp2tp4ep8", "dp4tp2ep8", "dp8ep8"]
    assert [str(layout) for layout in layouts_of(8, LLAMA_70B, H200)] == ["tp8"]
    assert [str(layout) for layout in layouts_of(16, DEEPSEEK_V3, B200)][-1] == "dp16ep16"
    assert layouts_of(16, LLAMA_70B, H200) == []
    assert [str(layout) for layout in layouts_of(1, KIMI_K2, H200)] == ["tp1"]


def test_latents_are_kept_by_every_gpu_and_kv_heads_are_shared_out():
    assert Layout(tp=8).kv_shards(GLM_5_2) == 1
    assert Layout(tp=4).kv_shards(LLAMA_70B) == 4
    assert Layout(tp=8).kv_shards(LLAMA_70B) == 8
