"""BlockNames: an engine's cached blocks under our names, from its KV events. Pure.

Engines name blocks by hashes of their own, which nobody else can compute. But their events say which tokens a block
holds and which block comes before it, and that is all that our names are made of (kllm.cache.block_hash).

    event   hashes [X4, X5]  parent X3  tokens of two blocks
    here    X3 -> N3                                            known since its own event
            X4 -> N4 = H(N3, tokens), X5 -> N5 = H(N4, tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kllm.cache.block_hash import chain, root_hash
from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Medium

FINGERPRINT = "external"  # of all external engines: a gateway serves one model, and names only guide its router
MOST_BLOCKS = 1 << 20
MEDIUMS = (Medium.DEVICE, Medium.HOST)  # what others store for all is not this engine's to report


class NamingCounts(msgspec.Struct):
    """Blocks of events that could not be used.

    unnamed: what comes before them is not known. other_size: they are not of the size that was expected.
    malformed: hashes and tokens do not match. refused: there were too many."""

    unnamed: int = 0
    other_size: int = 0
    malformed: int = 0
    refused: int = 0


class _Block(msgspec.Struct):
    """copies: in each of MEDIUMS. An engine may hold one block several times, and removes one at a time."""

    name: bytes
    copies: list[int]


class BlockNames:
    """fingerprint: where names begin (root_hash). block_tokens: size of a block. limit: blocks known at once.

    salt_of: the salt that an event's tag for it stands for: vLLM's events have the salt itself, ours a hash."""

    def __init__(
        self,
        fingerprint: str,
        block_tokens: int,
        limit: int = MOST_BLOCKS,
        salt_of: Callable[[str], str] = lambda tag: tag,
    ) -> None:
        self.counts = NamingCounts()
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._limit = limit
        self._salt_of = salt_of
        self._blocks: dict[bytes, _Block] = {}  # by the engine's hash

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self, medium: Medium) -> Iterator[bytes]:
        """Our names of all blocks that are there."""
        place = MEDIUMS.index(medium)
        return (block.name for block in self._blocks.values() if block.copies[place])

    def translate(self, event: CacheEvent) -> list[CacheEvent]:
        """What has changed, with our names. What is there already, or still, is no change."""
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return self._removed(event)
            case AllBlocksCleared():
                return self.clear()

    def clear(self) -> list[CacheEvent]:
        """Nothing is there any more."""
        gone: list[CacheEvent] = [BlockRemoved(names, medium) for medium in MEDIUMS if (names := [*self.held(medium)])]
        self._blocks.clear()
        return gone

    def doubt(self) -> None:
        """Events are lost. What is known is kept: a block that is wrongly thought to be there is computed there by the
        next request that is sent for it. But copies may have gone unnoticed, so that the next removal counts as the
        last one."""
        for block in self._blocks.values():
            block.copies = [min(1, count) for count in block.copies]

    def _stored(self, event: BlockStored) -> list[CacheEvent]:
        if event.medium not in MEDIUMS:
            return []
        if event.block_tokens != self._block_tokens:
            self.counts.other_size += len(event.hashes)
            return []
        names = self._names(event)
        place = MEDIUMS.index(event.medium)
        added = []
        for block_hash, name in zip(event.hashes, names, strict=False):
            block = self._blocks.get(block_hash)
            if block is None:
                if len(self._blocks) >= self._limit:
                    self.counts.refused += 1
                    continue
                block = self._blocks[block_hash] = _Block(name, [0] * len(MEDIUMS))
            block.copies[place] += 1
            if block.copies[place] == 1:
                added.append(block.name)
        if not added:
            return []
        return [BlockStored(added, None, (), self._block_tokens, event.medium)]

    def _names(self, event: BlockStored) -> Sequence[bytes]:
        """Of the event's blocks; fewer where they cannot be named."""
        hashes, tokens = event.hashes, event.tokens
        if not tokens:  # lower tiers know hashes only
            known = [block.name for block_hash in hashes if (block := self._blocks.get(block_hash)) is not None]
            self.counts.unnamed += len(hashes) - len(known)
            return known if len(known) == len(hashes) else ()
        if len(tokens) != len(hashes) * self._block_tokens or not all(0 <= token < 2**31 for token in tokens):
            self.counts.malformed += len(hashes)
            return ()
        if event.parent is None:
            parent = root_hash(self._fingerprint, self._salt_of(event.salt) if event.salt else "", event.adapter)
        elif (before := self._blocks.get(event.parent)) is not None:
            parent = before.name
        else:
            self.counts.unnamed += len(hashes)
            return ()
        raw, width = np.asarray(tokens, np.int32).tobytes(), 4 * self._block_tokens
        return chain(parent, (raw[start : start + width] for start in range(0, len(raw), width)))

    def _removed(self, event: BlockRemoved) -> list[CacheEvent]:
        if event.medium not in MEDIUMS:
            return []
        place = MEDIUMS.index(event.medium)
        gone = []
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.copies[place]:
                continue
            block.copies[place] -= 1
            if not block.copies[place]:
                gone.append(block.name)
                if not any(block.copies):
                    del self._blocks[block_hash]
        return [BlockRemoved(gone, event.medium)] if gone else []
