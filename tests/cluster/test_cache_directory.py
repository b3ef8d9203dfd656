"""CacheDirectory: numbered reports, gaps, dumps, incarnations, and what was just routed."""

from __future__ import annotations

import numpy as np

from kllm.cache.block_hash import chain, root_hash
from kllm.cluster.cache_directory import EXPECTED_S, CacheDirectory, prompt_hashes
from kllm.cluster.prefix_index import Tier, short_hashes
from kllm.messages import CacheChange, CacheDelta, CacheDump, Hello
from kllm.request import Request, SamplingParams

HELLO = Hello(instance_id="i", incarnation="1", num_blocks=100)
A, B, C = ((number).to_bytes(8, "big") for number in (11, 12, 13))


def hashes(*names: bytes) -> np.ndarray:
    return np.array([int.from_bytes(name, "big") for name in names], np.uint64)


def stored(sequence: int, *names: bytes, tier: int = 1) -> CacheDelta:
    return CacheDelta(sequence=sequence, changes=[CacheChange(tier, True, b"".join(names))])


def directory() -> CacheDirectory:
    made = CacheDirectory(2)
    for instance in range(2):
        made.joined(instance, HELLO, 200)
        assert made.heard(instance, CacheDump(sequence=0, changes=[]))
    return made


def test_reports_in_order_are_believed() -> None:
    known = directory()
    assert known.heard(0, stored(1, A, B))
    assert known.heard(0, stored(2, C, tier=2))
    assert known.heard(1, stored(1, A))
    assert known.heard(1, CacheDelta(sequence=2, changes=[CacheChange(1, False, A)]))
    found = known.matches(hashes(A, B, C))
    assert (found.l1.tolist(), found.l2.tolist(), found.l3.tolist()) == ([2, 0], [3, 0], [3, 0])


def test_a_gap_is_noticed_and_a_dump_mends_it() -> None:
    known = directory()
    known.heard(0, stored(1, A))
    assert not known.heard(0, stored(3, C))
    assert known.num_gaps == 1
    assert known.matches(hashes(A)).l1.tolist() == [0, 0], "what may be wrong is not believed"
    assert known.heard(0, stored(4, C)), "it has been asked already"
    assert known.heard(0, CacheDump(sequence=4, changes=[CacheChange(1, True, A + B)]))
    assert known.matches(hashes(A, B)).l1.tolist() == [2, 0]
    assert known.heard(0, stored(5, C))
    assert known.matches(hashes(A, B, C)).l1.tolist() == [3, 0]


def test_repeated_and_late_reports_change_nothing() -> None:
    known = directory()
    known.heard(0, stored(1, A))
    known.heard(0, CacheDelta(sequence=2, changes=[CacheChange(1, False, A)]))
    assert known.heard(0, stored(1, A))
    assert known.heard(0, CacheDump(sequence=1, changes=[CacheChange(1, True, A)]))
    assert known.matches(hashes(A)).l1.tolist() == [0, 0]


def test_an_incarnation_begins_empty() -> None:
    known = directory()
    known.heard(0, stored(1, A))
    known.left(0)
    assert not known.knows(0)
    assert known.matches(hashes(A)).l1.tolist() == [0, 0]


def test_all_blocks_of_a_tier_can_go() -> None:
    known = directory()
    known.heard(0, stored(1, A))
    known.heard(0, stored(2, A, B, tier=3))
    known.heard(1, CacheDelta(sequence=1, changes=[CacheChange(3, False, b"")]))
    assert known.matches(hashes(A, B)).l3.tolist() == [1, 0]


def test_what_was_routed_is_expected_for_a_while() -> None:
    known = directory()
    known.routed(1, hashes(A, B), now=100.0)
    assert known.matches(hashes(A, B)).l1.tolist() == [0, 2]
    known.routed(0, hashes(C), now=100.0 + EXPECTED_S)
    assert known.matches(hashes(A, B)).l1.tolist() == [0, 2]
    known.routed(0, hashes(C), now=100.0 + 2 * EXPECTED_S)
    assert known.matches(hashes(A, B)).l1.tolist() == [0, 0]


def test_hashes_of_a_prompt_are_the_names_of_its_blocks() -> None:
    tokens = list(range(300, 311))
    request = Request(request_id="r", prompt_token_ids=tokens, params=SamplingParams(), cache_salt="salt")
    blocks = [np.array(tokens[i : i + 4], np.int32).tobytes() for i in (0, 4)]
    assert prompt_hashes(request, "fp", 4).tolist() == short_hashes(chain(root_hash("fp", "salt"), blocks)).tolist()


def test_a_larger_fleet_gets_a_larger_table() -> None:
    known = directory()
    known.heard(0, stored(1, A))
    known.joined(1, HELLO, 10**6)
    assert not known.knows(0), "it must be asked again"
    assert known.held(0, Tier.DEVICE).tolist() == []


def test_a_table_that_is_too_small_is_replaced_and_everybody_asked() -> None:
    known = directory()
    assert known.heard(1, stored(1, B))
    many = np.arange(1, 10**5, dtype=np.uint64).astype(">u8").tobytes()
    full = CacheDump(sequence=5, changes=[CacheChange(2, True, many)])
    assert not known.heard(0, full), "it did not fit: asked again, for a larger table"
    assert not known.knows(1)
    assert not known.heard(1, stored(2, C)), "what the other one had is gone too: it is asked"
    assert known.heard(1, stored(3, C)), "once"
    assert known.heard(0, full)
    assert known.heard(1, CacheDump(sequence=3, changes=[CacheChange(1, True, B + C)]))
    assert known.num_refused == 0
    assert known.known(0).host_blocks == 10**5 - 1
    assert known.matches(hashes(B, C)).l1.tolist() == [0, 2]


def test_what_is_known_of_an_instance() -> None:
    known = directory()
    known.routed(0, hashes(A, B), now=0.0)
    assert known.known(0).unreported_blocks == 2
    known.heard(0, stored(1, A, A, B))
    known.heard(0, stored(2, C, tier=2))
    known.heard(0, CacheDelta(sequence=3, changes=[CacheChange(1, False, A)]))
    one = known.known(0)
    assert (one.sequence, one.device_blocks, one.host_blocks) == (3, 1, 1)
    assert (one.gaps, one.dumps, one.unreported_blocks) == (0, 1, 0)
    known.heard(0, stored(5, A))
    assert known.known(0).sequence is None
    assert (known.known(0).gaps, known.known(0).device_blocks) == (1, 0)


def test_what_is_expected_is_bounded_and_the_latest_is_kept() -> None:
    known = directory()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2**63, 30_000, dtype=np.uint64) for _ in range(200)]
    for prompt in prompts:
        known.routed(0, prompt, now=1.0)
    assert known.matches(prompts[-1]).l1.tolist() == [30_000, 0]
    assert known.matches(prompts[0]).l1.tolist() == [0, 0]
