"""CacheReporter: tells the gateway what an instance's cache holds, so that requests are sent where their prefix is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventSink, Medium
from kllm.messages import CacheChange, CacheDelta, CacheDump

HASH_BYTES = 8  # that a gateway needs: see kllm.cluster.prefix_index
ALL = b""  # instead of hashes: every block of the tier
TIERS = {Medium.DEVICE: 1, Medium.HOST: 2, Medium.STORAGE: 3}

Send = Callable[[CacheDelta | CacheDump], bool]
Contents = Callable[[], list[CacheChange]]


def change(tier: int, stored: bool, hashes: Iterable[bytes]) -> CacheChange:
    return CacheChange(tier, stored, b"".join(block_hash[-HASH_BYTES:] for block_hash in hashes))


class CacheReporter:
    """An EventSink, called on the event loop's thread. What one turn of the loop has changed is one message. Silent
    until the gateway watches.

    send: False if the message could not be sent; the gap in the numbers then makes the gateway ask again.
    contents: what is cached now, in L1 and L2.
    """

    def __init__(self) -> None:
        self._watched = False
        self._sequence = 0
        self._changes: list[CacheChange] = []
        self._send: Send = lambda message: False
        self._contents: Contents = list

    @property
    def sequence(self) -> int:
        """Of the latest report."""
        return self._sequence

    def connect(self, send: Send, contents: Contents) -> None:
        self._send, self._contents = send, contents

    def __call__(self, event: CacheEvent) -> None:
        if not self._watched:
            return
        if not self._changes:
            asyncio.get_running_loop().call_soon(self._flush)
        match event:
            case BlockStored():
                self._changes.append(change(TIERS[event.medium], True, event.hashes))
            case BlockRemoved():
                self._changes.append(change(TIERS[event.medium], False, event.hashes))
            case AllBlocksCleared():
                self._changes += [CacheChange(tier, False, ALL) for tier in TIERS.values()]

    def _flush(self) -> None:
        if self._changes:
            changes, self._changes = self._changes, []
            self._sequence += 1
            self._send(CacheDelta(sequence=self._sequence, changes=changes))

    def watch(self) -> None:
        """The gateway wants to know, or has missed something."""
        self._watched = True
        self._flush()
        self._send(CacheDump(sequence=self._sequence, changes=self._contents()))


def fan_out(*sinks: EventSink | None) -> EventSink | None:
    """All of these sinks as one; None if there is none."""
    wanted = [sink for sink in sinks if sink is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None

    def to_all(event: CacheEvent) -> None:
        for sink in wanted:
            sink(event)

    return to_all
