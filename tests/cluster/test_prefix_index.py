"""PrefixIndex against a naive oracle: sets of hashes per instance and tier."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.cache.block_hash import chain, root_hash
from kllm.cluster.prefix_index import FINE, STRIDE, PrefixIndex, Tier, marks, short_hashes


def hashes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def leading(held: set[int], prompt: list[int]) -> int:
    return next((i for i, block in enumerate(prompt) if block not in held), len(prompt))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), instances=st.sampled_from((1, 2, 7, 63, 64, 65, 130)))
def test_what_it_says_is_what_it_was_told(seed: int, instances: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(4000, instances)
    device: list[set[int]] = [set() for _ in range(instances)]
    host: list[set[int]] = [set() for _ in range(instances)]
    store: set[int] = set()
    universe = [rng.getrandbits(64) | 1 for _ in range(300)]
    for _ in range(30):
        instance, some = rng.randrange(instances), rng.choices(universe, k=rng.randrange(1, 60))
        tier = rng.choice(list(Tier))
        held = {Tier.DEVICE: device[instance], Tier.HOST: host[instance], Tier.STORE: store}[tier]
        kind = rng.random()
        if kind < 0.65:
            index.stored(instance, hashes(*some), tier)
            held |= set(some)
        elif kind < 0.95:
            index.removed(instance, hashes(*some), tier)
            held -= set(some)
        else:
            index.leave(instance)
            device[instance], host[instance] = set(), set()
        assert index.num_blocks == len(store.union(*device, *host))
    for _ in range(10):
        prompt = rng.choices(universe, k=rng.randrange(0, 40))
        found = index.matches(hashes(*prompt))
        for i in range(instances):
            local = device[i] | host[i]
            assert found.l1[i] == leading(device[i], prompt)
            assert found.l2[i] == leading(local, prompt)
            assert found.l3[i] == leading(local | store, prompt)
    assert index.num_refused == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), instances=st.sampled_from((1, 5, 64, 70)))
def test_where_caches_hold_prefixes_long_prompts_are_exact(seed: int, instances: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(10_000, instances)
    length = rng.choice((FINE - 1, FINE, FINE + 1, FINE + STRIDE, rng.randrange(FINE, 3 * FINE)))
    prompt = np.array([rng.getrandbits(64) | 1 for _ in range(length)], np.uint64)
    near = rng.randrange(length + 1)

    def some() -> int:
        """So many leading blocks; often as many as others."""
        return rng.choice((0, near, min(near + 1, length), length, rng.randrange(length + 1)))

    device, host, store = [some() for _ in range(instances)], [some() for _ in range(instances)], some()
    for tier, held in ((Tier.DEVICE, device), (Tier.HOST, host)):
        if rng.random() < 0.3:
            held[:] = [0] * instances
        for instance, blocks in enumerate(held):
            index.stored(instance, prompt[:blocks], tier)
    index.stored(0, prompt[:store], Tier.STORE)
    for tail in (0, 1, STRIDE, 2 * FINE):  # the prompt goes on with what nobody has
        unknown = np.array([rng.getrandbits(64) | 1 for _ in range(tail)], np.uint64)
        found = index.matches(np.concatenate((prompt, unknown)))
        local = [max(pair) for pair in zip(device, host, strict=True)]
        assert found.l1.tolist() == device
        assert found.l2.tolist() == local
        assert found.l3.tolist() == [max(blocks, store) for blocks in local]


def test_of_holes_in_a_long_prompt_only_those_at_marks_are_seen() -> None:
    index, prompt = PrefixIndex(10_000, 2), np.arange(1, 3001, dtype=np.uint64)
    for instance in range(2):
        index.stored(instance, prompt, Tier.DEVICE)
    index.removed(0, prompt[marks(3000)[FINE + 5] :][:1], Tier.DEVICE)
    index.removed(1, prompt[marks(3000)[FINE + 5] + 1 :][:1], Tier.DEVICE)
    assert index.matches(prompt).l1.tolist() == [FINE + 6 * STRIDE - 1, 3000]


def test_what_does_not_fit_is_not_known() -> None:
    index = PrefixIndex(100, 2)
    many = np.arange(1, 5001, dtype=np.uint64)
    index.stored(0, many, Tier.DEVICE)
    assert index.num_blocks + index.num_refused == 5000
    assert index.num_blocks >= 90
    index.leave(0)
    assert index.num_blocks == 0
    index.stored(1, hashes(7, 8), Tier.DEVICE)
    assert index.matches(hashes(7, 8, 9)).l1.tolist() == [0, 2]


def test_half_a_million_bytes_hold_twenty_thousand_blocks() -> None:
    """At most 32 bytes for each block of each instance when every place may be used."""
    index = PrefixIndex(20_000, 8)
    assert index.bytes_used / 20_000 <= 32
    rng = np.random.default_rng(0)
    index.stored(0, rng.integers(1, 2**63, 20_000).astype(np.uint64), Tier.DEVICE)
    assert index.num_refused < 200  # of 20,000: all the buckets that they may be in are full


def test_short_hashes_are_those_of_events() -> None:
    names = chain(root_hash("fingerprint"), [b"abc", b"def"])
    assert short_hashes(names).tolist() == [int.from_bytes(name[-8:], "big") for name in names]


def test_bounds() -> None:
    with pytest.raises(ValueError, match="1 to 256 instances"):
        PrefixIndex(10, 257)
    index = PrefixIndex(10, 256)
    with pytest.raises(ValueError, match="at most 256 instances"):
        index.grow(257)


def test_more_instances_join() -> None:
    index = PrefixIndex(1000, 2)
    index.stored(1, hashes(5, 6), Tier.DEVICE)
    index.grow(130)
    index.stored(129, hashes(5, 6, 7), Tier.HOST)
    found = index.matches(hashes(5, 6, 7, 8))
    assert len(found.l1) == 130
    assert (found.l1[1], found.l1[129], found.l2[129], found.l1[65]) == (2, 0, 3, 0)
    index.leave(1)
    assert index.num_blocks == 3
    index.removed(129, hashes(5), Tier.HOST)
    assert index.num_blocks == 2
    assert index.matches(hashes(5, 6)).l2[129] == 0
