"""Engines' blocks under our names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kllm.cache.block_hash import chain, root_hash
from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Medium
from kllm.cluster.cache_directory import prompt_hashes
from kllm.cluster.external.block_names import BlockNames
from kllm.cluster.prefix_index import short_hashes
from kllm.request import Request, SamplingParams

BLOCK = 4
TOKENS = list(range(100, 112))  # three blocks
THEIRS = [b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"]


def ours(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    blocks = np.asarray(tokens, np.int32).reshape(-1, BLOCK)
    return chain(root_hash("f", salt), [block.tobytes() for block in blocks])


def stored(first: int, last: int, medium: Medium = Medium.DEVICE, tokens: Sequence[int] = TOKENS) -> BlockStored:
    """Blocks first to last - 1 of TOKENS."""
    parent = THEIRS[first - 1] if first else None
    return BlockStored(THEIRS[first:last], parent, tokens[first * BLOCK : last * BLOCK], BLOCK, medium)


def removed(index: int, medium: Medium = Medium.DEVICE) -> BlockRemoved:
    return BlockRemoved([THEIRS[index]], medium)


def hashes(events: list[CacheEvent]) -> list[bytes]:
    assert len(events) == 1
    event = events[0]
    assert not isinstance(event, AllBlocksCleared)
    return list(event.hashes)


def test_names_are_those_that_a_gateway_computes_of_the_prompt() -> None:
    names = BlockNames("f", BLOCK)
    assert hashes(names.translate(stored(0, 3))) == ours(TOKENS)
    request = Request(request_id="r", prompt_token_ids=[*TOKENS, 1], params=SamplingParams())
    wanted = prompt_hashes(request, "f", BLOCK)
    assert short_hashes(list(names.held(Medium.DEVICE))).tolist() == wanted.tolist()


def test_blocks_follow_their_parents_event_by_event() -> None:
    names = BlockNames("f", BLOCK)
    assert hashes(names.translate(stored(0, 1))) == ours(TOKENS)[:1]
    assert hashes(names.translate(stored(1, 3))) == ours(TOKENS)[1:]


def test_what_comes_before_must_be_known() -> None:
    names = BlockNames("f", BLOCK)
    assert names.translate(stored(1, 3)) == []
    assert names.counts.unnamed == 2
    assert len(names) == 0


def test_the_salt_is_part_of_the_name() -> None:
    event = BlockStored(THEIRS[:1], None, TOKENS[:BLOCK], BLOCK, Medium.DEVICE, salt="tag")
    assert hashes(BlockNames("f", BLOCK).translate(event)) == ours(TOKENS[:BLOCK], "tag")
    names = BlockNames("f", BLOCK, salt_of={"tag": "pepper"}.__getitem__)
    assert hashes(names.translate(event)) == ours(TOKENS[:BLOCK], "pepper")


def test_a_block_that_is_there_twice_goes_with_its_last_copy() -> None:
    """vLLM keeps what two requests have computed at the same time twice, and evicts one at a time."""
    names = BlockNames("f", BLOCK)
    names.translate(stored(0, 1))
    assert names.translate(stored(0, 1)) == []
    assert names.translate(removed(0)) == []
    assert hashes(names.translate(removed(0))) == ours(TOKENS)[:1]
    assert names.translate(removed(0)) == []
    assert len(names) == 0


def test_tiers_are_apart() -> None:
    names = BlockNames("f", BLOCK)
    names.translate(stored(0, 2))
    below = names.translate(stored(0, 2, Medium.HOST, tokens=[]))  # lower tiers say hashes only
    assert hashes(below) == ours(TOKENS)[:2]
    assert hashes(names.translate(removed(0))) == ours(TOKENS)[:1]
    assert list(names.held(Medium.DEVICE)) == ours(TOKENS)[1:2]
    assert list(names.held(Medium.HOST)) == ours(TOKENS)[:2]
    assert hashes(names.translate(stored(2, 3))) == ours(TOKENS)[2:]
    assert names.translate(stored(0, 1, Medium.STORAGE)) == []  # not this engine's alone


def test_clearing_removes_all_of_every_tier() -> None:
    names = BlockNames("f", BLOCK)
    names.translate(stored(0, 3))
    names.translate(stored(0, 1, Medium.HOST))
    gone = names.translate(AllBlocksCleared())
    assert gone == [BlockRemoved(ours(TOKENS), Medium.DEVICE), BlockRemoved(ours(TOKENS)[:1], Medium.HOST)]
    assert len(names) == 0
    assert names.clear() == []


def test_after_a_gap_the_next_removal_is_the_last() -> None:
    names = BlockNames("f", BLOCK)
    names.translate(stored(0, 1))
    names.translate(stored(0, 1))
    names.doubt()  # one of the copies may have gone meanwhile
    assert list(names.held(Medium.DEVICE)) == ours(TOKENS)[:1]
    assert hashes(names.translate(removed(0))) == ours(TOKENS)[:1]


def test_events_that_do_not_fit() -> None:
    names = BlockNames("f", BLOCK, limit=2)
    assert names.translate(BlockStored(THEIRS[:1], None, TOKENS[:8], 8, Medium.DEVICE)) == []
    assert names.counts.other_size == 1
    assert names.translate(BlockStored(THEIRS[:2], None, TOKENS[:5], BLOCK, Medium.DEVICE)) == []
    assert names.translate(BlockStored(THEIRS[:1], None, [1, 2, 3, -4], BLOCK, Medium.DEVICE)) == []
    assert names.counts.malformed == 3
    assert hashes(names.translate(stored(0, 3))) == ours(TOKENS)[:2]
    assert names.counts.refused == 1
    assert names.translate(removed(2)) == []
