from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.costs.capacity import Deployment, smallest_gpus
from kllm.costs.errors import CostError, DoesNotFitError
from kllm.costs.hardware import H100, H200, HARDWARE, THIS_MACHINE
from kllm.costs.layout import Layout, parse_layout
from kllm.costs.model_specs import DEEPSEEK_V3, GLM_5_2, LLAMA_70B, MODELS, SMOLLM2_135M
from kllm.costs.roofline import OPERATOR_CLASSES, RooflineModel
from kllm.costs.step import StepWork, step_work

FIELDS = [field.name for field in dataclasses.fields(StepWork)]


def every_model() -> list[RooflineModel]:
    models = []
    for hardware, spec in itertools.product(HARDWARE.values(), MODELS.values()):
        try:
            layout = smallest_gpus(Deployment(spec, hardware)).layout
        except DoesNotFitError:
            continue
        models.append(RooflineModel(hardware, spec, layout))
    return models


ALL = every_model()
SHARED = [RooflineModel(H200, GLM_5_2, Layout(tp=8)), *(model for model in ALL if model.layout.dp == 1)]
GROUPED = [model for model in ALL if model.layout.dp > 1]
ANY_WORK = st.builds(StepWork, **{name: st.integers(0, 10**6) for name in FIELDS})
ROWS = st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 4096), st.booleans()), min_size=1, max_size=40)


@given(model=st.sampled_from(SHARED), work=ANY_WORK, name=st.sampled_from(FIELDS), more=st.integers(1, 10**6))
def test_more_work_never_takes_less_time(model, work, name, more):
    larger = dataclasses.replace(work, **{name: getattr(work, name) + more})
    assert 0 < model.seconds(work) <= model.seconds(larger) * (1 + 1e-12)


@given(model=st.sampled_from(GROUPED), rows=ROWS, times=st.integers(2, 5))
def test_the_same_rows_several_times_never_take_less_time_in_groups(model, rows, times):
    once, more = step_work(rows, model.model.top_k), step_work(rows * times, model.model.top_k)
    assert 0 < model.seconds(once) <= model.seconds(more) * (1 + 1e-12)


@given(model=st.sampled_from(ALL), rows=ROWS)
def test_the_breakdown_adds_up(model, rows):
    work = step_work(rows, model.model.top_k)
    parts = model.breakdown(work)
    assert tuple(parts) == OPERATOR_CLASSES
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(model.seconds(work))


def test_decoding_one_stream_of_a_dense_model_reads_all_weights():
    model = RooflineModel(H100, LLAMA_70B, Layout(tp=8))
    work = step_work([(1024, 1, True)])
    parts = model.breakdown(work)
    read = (LLAMA_70B.parameters - LLAMA_70B.vocab_size * LLAMA_70B.hidden) * 2 / 8 / (0.8 * 3.35e12)
    assert parts["gemm"] + parts["head"] == pytest.approx(read, rel=1e-9)
    # Engines on 8 H100 decode one bf16 stream of a 70 B model at 80 to 130 tokens a second.
    assert 1 / 130 < model.seconds(work) < 1 / 80


def test_prefill_of_a_dense_model_reaches_the_stated_utilisation():
    model = RooflineModel(H100, LLAMA_70B, Layout(tp=8))
    seconds = model.seconds(step_work([(0, 8192, True)]))
    flops = 2 * LLAMA_70B.active_parameters * 8192
    assert flops / seconds / (8 * H100.flops("bf16")) == pytest.approx(0.45, abs=0.03)


def test_decoding_many_streams_of_a_dense_model_reaches_the_stated_utilisation():
    model = RooflineModel(H100, LLAMA_70B, Layout(tp=8))
    seconds = model.seconds(step_work([(1024, 1, True)] * 256))
    flops = 2 * LLAMA_70B.active_parameters * 256
    assert flops / seconds / (8 * H100.flops("bf16")) == pytest.approx(0.30, abs=0.05)


@pytest.mark.parametrize(
    ("rows", "measured_ms"),
    [
        ([(536, 1, True)], 10.7),
        ([(536, 1, True)] * 8, 17.3),
        ([(536, 1, True)] * 32, 42.2),
        ([(0, 512, True)], 318),
    ],
)
def test_this_machine_is_about_what_was_measured(rows, measured_ms):
    model = RooflineModel(THIS_MACHINE, SMOLLM2_135M, Layout())
    ratio = model.seconds(step_work(rows)) * 1e3 / measured_ms
    assert 0.6 < ratio < 1.1  # the host gave 33 to 50 of the 56 GB/s while the first was measured


def test_experts_are_read_once_and_only_those_reached():
    model = RooflineModel(H200, DEEPSEEK_V3, parse_layout("dp8ep8"))
    one, few, many = (model.breakdown(step_work([(1000, 1, True)] * rows))["moe"] for rows in (1, 8, 128))
    everything = DEEPSEEK_V3.routed_parameters / 8 / (0.8 * 4.8e12)
    assert one == pytest.approx(everything * 8 / 256)
    assert few == pytest.approx(everything * (1 - (1 - 8 / 256) ** 8))
    assert many == pytest.approx(everything, rel=0.02)


def test_sparse_attention_grows_with_the_context_only_in_its_indexer():
    model = RooflineModel(H200, GLM_5_2, Layout(tp=8))
    near, far = (model.breakdown(step_work([(length, 1, True)] * 32, 2048)) for length in (4_000, 64_000))
    assert far["attention"] == near["attention"]
    assert far["indexer"] == pytest.approx(16 * near["indexer"], rel=0.01)


def test_a_lone_prompt_uses_one_group_and_many_use_all():
    model = RooflineModel(H200, GLM_5_2, parse_layout("dp8ep8"))
    one, eight = (model.breakdown(step_work([(0, 4096, True)] * rows, 2048)) for rows in (1, 8))
    assert one["gemm"] == eight["gemm"]
    assert one["attention"] == pytest.approx(eight["attention"])
    assert eight["moe"] == pytest.approx(8 * one["moe"], rel=0.01)


def test_groups_save_the_copies_of_latents_in_attention():
    rows = step_work([(60_000, 1, True)] * 64)
    tensor = RooflineModel(H200, DEEPSEEK_V3, Layout(tp=8)).breakdown(rows)["attention"]
    groups = RooflineModel(H200, DEEPSEEK_V3, parse_layout("dp8ep8")).breakdown(rows)["attention"]
    assert tensor > 2 * groups


def test_experts_over_two_nodes_pay_for_the_network():
    rows = step_work([(0, 4096, True)] * 16)
    one = RooflineModel(H200, DEEPSEEK_V3, parse_layout("dp8ep8")).breakdown(rows)["all_to_all"]
    two = RooflineModel(H200, DEEPSEEK_V3, parse_layout("dp16ep16")).breakdown(rows)["all_to_all"]
    assert two > 2 * one


def test_factors_scale_their_class_alone():
    model = RooflineModel(H200, GLM_5_2, Layout(tp=8))
    work = step_work([(5000, 100, True)] * 10, 2048)
    plain = model.breakdown(work)
    for name in OPERATOR_CLASSES:
        scaled = model.scaled({name: 1.5}).breakdown(work)
        assert scaled == pytest.approx(plain | {name: 1.5 * plain[name]})
    with pytest.raises(ValueError, match="no operator classes: gem"):
        model.scaled({"gem": 2.0})


def test_a_layout_that_does_not_suit_is_refused():
    with pytest.raises(CostError, match="9 heads"):
        RooflineModel(H200, SMOLLM2_135M, Layout(tp=2))
