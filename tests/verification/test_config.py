"""The knobs and the table of variants."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kllm.config import EngineConfig
from kllm.verification.config import VerifyConfig
from kllm.verification.gate import chosen_variants
from kllm.verification.variants import EXACT, PLAIN, VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_engine_config_and_not_plain(name):
    options = VARIANTS[name].engine_options
    EngineConfig(model="m", **options)
    assert options != PLAIN


def test_plain_has_every_feature_off():
    plain = EngineConfig(model="m", **PLAIN)
    assert (plain.kernels, plain.dtype, plain.quantization, plain.kv_cache_dtype) == (
        "reference",
        "float32",
        "none",
        "float32",
    )
    assert (plain.enable_prefix_caching, plain.max_num_seqs, plain.pipeline_depth) == (False, 1, 1)


def test_scheduling_features_are_exact():
    for name in ("prefix-caching", "chunked-prefill", "batching", "pipeline-depth", "cpu", "all-float32"):
        assert VARIANTS[name].limits is EXACT


def test_variants_are_chosen_by_name_in_the_order_given():
    config = VerifyConfig(variants=["int8, batching", "int8"])
    assert [variant.name for variant in chosen_variants(config)] == ["int8", "batching"]


def test_quick_is_a_selection_of_all():
    every, quick = chosen_variants(VerifyConfig()), chosen_variants(VerifyConfig(quick=True))
    assert every == list(VARIANTS.values())
    assert 0 < len(quick) < len(every)
    assert [variant for variant in every if variant in quick] == quick


def test_an_unknown_variant_is_an_error_with_the_choices():
    with pytest.raises(ValidationError, match="nonsense is not a variant: choose from prefix-caching, "):
        VerifyConfig(variants=["nonsense"])
