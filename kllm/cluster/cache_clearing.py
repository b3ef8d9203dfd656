"""Clearing the caches of all instances, and what to make of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kllm.cluster.slot import Slot
from kllm.messages import CacheCleared

CLEAR_TIMEOUT_S = 30.0


class ClearedInstance(msgspec.Struct, frozen=True):
    """What became of one instance's cache. complete: nothing that it had cached is left.

    error: why something is left, or why that is not known; None where requests still use it."""

    instance: int
    complete: bool
    error: str | None = None


async def clear_caches(slots: Sequence[Slot], store: bool, timeout: float) -> list[ClearedInstance]:
    """One answer for each slot, after at most `timeout` seconds. store: clear the store that they share, too."""
    answers = await asyncio.gather(*(_ask(slot, store, timeout) for slot in slots))
    store_cleared = store and any(answer is not None and answer.error is None for answer in answers)
    return [
        _without_memory(slot, store, store_cleared)
        if answer is None
        else ClearedInstance(slot.index, answer.complete, answer.error)
        for slot, answer in zip(slots, answers, strict=True)
    ]


async def _ask(slot: Slot, store: bool, timeout: float) -> CacheCleared | None:
    try:
        return await slot.clear_cache(store, timeout)
    except TimeoutError:
        return CacheCleared(token="", complete=False, error=f"the instance did not answer in {timeout:g} s")


def _without_memory(slot: Slot, store: bool, store_cleared: bool) -> ClearedInstance:
    """An instance that is starting, or died meanwhile, has nothing in its memory; one that was started elsewhere may be
    there with all of it, and only not be reached. The store outlives both."""
    if slot.address is not None and not slot.left:
        return ClearedInstance(slot.index, False, "it cannot be reached")
    if not store:
        return ClearedInstance(slot.index, True)
    if not store_cleared:
        return ClearedInstance(slot.index, False, "no instance was ready that could clear the store")
    if slot.ready:
        return ClearedInstance(slot.index, False, "the instance became ready while the store was being cleared")
    return ClearedInstance(slot.index, True)
