"""KV capacity, at the figures of the worked example: 2.9 M → 21.2 M tokens for GLM-5.2 on 8 GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from kllm.costs.capacity import Capacity, Deployment, best_layout, kv_capacity, smallest_gpus
from kllm.costs.errors import CostError, DoesNotFitError, UnknownNameError
from kllm.costs.hardware import B200, B300, H100, H200, HARDWARE, THIS_MACHINE
from kllm.costs.layout import Layout, parse_layout
from kllm.costs.model_specs import (
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    GLM_5_2,
    KIMI_K2,
    LLAMA_70B,
    MODELS,
    SMOLLM2_135M,
)

EXAMPLE = Deployment(GLM_5_2, B300, usable_bytes=254.6e9, activation_bytes=4e9)
TP8, DP8 = parse_layout("tp8"), parse_layout("dp8ep8")


def both(deployment: Deployment) -> tuple[Capacity, Capacity]:
    return kv_capacity(deployment, TP8), kv_capacity(deployment, DP8)


def test_the_worked_example():
    tensor, data = both(EXAMPLE)
    assert tensor.kv_bytes_per_token == data.kv_bytes_per_token == 53_940
    assert tensor.tokens == pytest.approx(2.90e6, rel=0.01)
    assert data.tokens == pytest.approx(21.20e6, rel=0.01)
    assert data.tokens / tensor.tokens == pytest.approx(7.32, rel=0.01)
    assert tensor.weight_bytes_per_gpu == pytest.approx(94.4e9, rel=0.005)
    assert data.weight_bytes_per_gpu == pytest.approx(107.7e9, rel=0.005)
    assert data.weight_bytes_per_gpu - tensor.weight_bytes_per_gpu == pytest.approx(13.2e9, rel=0.01)


def test_usual_memory_of_a_b300_gives_the_same_within_one_percent():
    tensor, data = both(Deployment(GLM_5_2, B300))
    assert tensor.usable_bytes_per_gpu == pytest.approx(254.6e9, rel=0.005)
    assert tensor.tokens == pytest.approx(2.90e6, rel=0.01)
    assert data.tokens == pytest.approx(21.20e6, rel=0.01)


def test_the_ratio_is_below_the_number_of_groups_by_the_copied_weights():
    tensor, data = both(EXAMPLE)
    copied = data.weight_bytes_per_gpu - tensor.weight_bytes_per_gpu
    assert data.tokens / tensor.tokens == pytest.approx(8 * (1 - copied / tensor.kv_bytes_per_gpu), rel=1e-5)


@pytest.mark.parametrize(
    ("hardware", "usable", "tokens", "ratio"),
    [(H200, 0.9 * 141e9, (0.53e6, 2.3e6), 4.3), (B200, 0.9 * 180e9, (1.2e6, 7.5e6), 6.3)],
)
def test_smaller_gpus_cannot_be_what_was_reported(hardware, usable, tokens, ratio):
    found = both(Deployment(GLM_5_2, hardware, usable_bytes=usable))
    assert [capacity.tokens for capacity in found] == pytest.approx(tokens, rel=0.035)  # stated to two digits
    assert found[1].tokens / found[0].tokens == pytest.approx(ratio, rel=0.02)


def test_bf16_kv_cannot_be_what_was_reported():
    tensor, _ = both(dataclasses.replace(EXAMPLE, kv_dtype="bf16"))
    assert tensor.kv_bytes_per_token == 95_232
    assert 2.9e6 * tensor.kv_bytes_per_token == pytest.approx(276e9, rel=0.005)
    assert tensor.tokens < 2.0e6


def test_the_mtp_layer_takes_weights_and_kv():
    plain = kv_capacity(EXAMPLE, DP8)
    more = kv_capacity(dataclasses.replace(EXAMPLE, mtp=True), DP8)
    assert more.kv_bytes_per_token == 54_728
    assert more.weight_bytes_per_gpu > plain.weight_bytes_per_gpu
    assert more.tokens < plain.tokens


@pytest.mark.parametrize(
    ("model", "hardware", "gpus"),
    [
        (GLM_5_2, H200, 8),
        (DEEPSEEK_V3, H200, 8),
        (DEEPSEEK_V3, H100, 16),
        (KIMI_K2, H200, 16),
        (LLAMA_70B, H100, 4),
        (SMOLLM2_135M, H100, 1),
        (SMOLLM2_135M, THIS_MACHINE, 1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_smallest_number_of_gpus(model, hardware, gpus):
    found = smallest_gpus(Deployment(model, hardware))
    assert found.layout.gpus == gpus
    assert found.useful


def test_latents_are_best_kept_once_and_kv_heads_shared_out():
    assert str(smallest_gpus(Deployment(GLM_5_2, H200)).layout) == "dp8ep8"
    assert str(smallest_gpus(Deployment(LLAMA_70B, H200)).layout) == "tp2"


def test_bf16_weights_need_twice_the_gpus():
    assert smallest_gpus(Deployment(GLM_5_2, H200, weights_dtype="bf16")).layout.gpus == 16


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda hardware: hardware.name)
def test_memory_is_never_promised_twice(model, hardware):
    try:
        found = smallest_gpus(Deployment(model, hardware))
    except DoesNotFitError:
        assert hardware is THIS_MACHINE
        return
    used = found.weight_bytes_per_gpu + found.activation_bytes_per_gpu
    used += found.tokens_per_group * found.kv_bytes_per_token_per_gpu
    assert used <= found.usable_bytes_per_gpu < hardware.memory_bytes
    assert found.tokens == found.layout.dp * found.tokens_per_group


def test_state_of_running_requests_is_told_apart():
    assert kv_capacity(Deployment(DEEPSEEK_V4_FLASH, H200), Layout(tp=4)).state_bytes_per_request == 15_400_000


def test_what_cannot_be_is_refused_with_a_reason():
    with pytest.raises(DoesNotFitError, match=r"glm-5.2 does not fit: tp4 on h200 needs 187\.\d GB of weights"):
        kv_capacity(Deployment(GLM_5_2, H200), Layout(tp=4))
    with pytest.raises(DoesNotFitError, match="llama-70b does not fit: tp1 on this-machine"):
        smallest_gpus(Deployment(LLAMA_70B, THIS_MACHINE))
    with pytest.raises(CostError, match="smollm2-135m has no layout here on 2 h200"):
        best_layout(Deployment(SMOLLM2_135M, H200), 2)
    with pytest.raises(UnknownNameError, match="unknown KV format of this model 'int8': known are bf16, fp8"):
        smallest_gpus(Deployment(GLM_5_2, H200, kv_dtype="int8"))
    with pytest.raises(UnknownNameError, match="unknown weight format 'fp3'"):
        smallest_gpus(Deployment(GLM_5_2, H200, weights_dtype="fp3"))
