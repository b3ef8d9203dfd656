from __future__ import annotations

import msgspec
import pytest

from kllm.cache.kv_spec import Group, KVSpec, Record


def gqa(block_tokens: int = 16, layers: int = 30, heads: int = 3, size: int = 64, **fields: object) -> KVSpec:
    records = tuple(Record(name, layers, (heads, size), "bfloat16", shard="heads") for name in ("k", "v"))
    return KVSpec((Group("full", records),), block_tokens, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [1, 16, 128])
def test_gqa_page_is_keys_and_values_of_all_layers(block_tokens: int) -> None:
    """SmolLM2-135M: 30 layers × 3 KV heads × 64 × (k and v) × 2 bytes = 23,040 bytes per token."""
    assert gqa(block_tokens).page_bytes() == 23_040 * block_tokens


def test_mla_page_is_one_latent_per_layer() -> None:
    """DeepSeek-V3: (512 latent + 64 rotary) × 2 bytes = 1,152 bytes per token and layer, 61 layers."""
    spec = KVSpec((Group("full", (Record("latent", 61, (576,), "bfloat16"),)),), 16)
    assert spec.page_bytes() == 1_152 * 61 * 16


def test_a_strided_record_keeps_one_entry_for_several_tokens() -> None:
    record = Record("index", 2, (10,), "uint8", stride=4)
    assert record.entry_bytes() == 10
    assert record.page_bytes(16) == 2 * 10 * 4
    full = Group("full", (record, Record("k", 1, (8,), "float32")))
    assert KVSpec((full,), 16).page_bytes() == 80 + 8 * 4 * 16


def test_a_block_must_hold_whole_entries() -> None:
    with pytest.raises(ValueError, match="16 is not a multiple of stride 3 of index"):
        KVSpec((Group("full", (Record("index", 1, (1,), "uint8", stride=3),)),), 16)


def test_page_bytes_add_up_over_groups() -> None:
    window = Group("window", (Record("k", 2, (4,), "float16"),), keep=128, resume=127)
    spec = KVSpec((*gqa().groups, window), 16)
    assert spec.page_bytes() == gqa().page_bytes() + 2 * 4 * 2 * 16


def test_only_one_group_that_keeps_all_tokens_is_supported_yet() -> None:
    assert gqa().full_group().name == "full"
    window = Group("window", (Record("k", 2, (4,), "float16"),), keep=128)
    for groups in ((window,), (*gqa().groups, window), ()):
        with pytest.raises(ValueError, match="one group that keeps all tokens"):
            KVSpec(groups, 16).full_group()


def test_the_fingerprint_tells_specs_apart() -> None:
    specs = [gqa(), gqa(block_tokens=32), gqa(layers=31), gqa(heads=4), gqa(giveback=1), gqa(model="smollm2")]
    prints = [spec.fingerprint for spec in specs]
    assert len(set(prints)) == len(prints)
    assert gqa().fingerprint == prints[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(gqa()), type=KVSpec).fingerprint == prints[0]
