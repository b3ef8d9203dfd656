from __future__ import annotations

import asyncio
from collections.abc import Sequence

from support.virtual_time import run

from kllm.cache.events import AllBlocksCleared, BlockRemoved, CacheEvent, Medium
from kllm.engine.event_feed import EventFeed
from kllm.transport.event_publisher import PublisherCounts


class Publisher:
    def __init__(self) -> None:
        self.batches: list[Sequence[CacheEvent]] = []
        self.closed = False
        self.counts = PublisherCounts(dropped=2, failed=1)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        assert not self.closed
        self.counts.sent += 1
        self.batches.append(events)

    def close(self) -> None:
        self.closed = True


def removed(name: bytes) -> BlockRemoved:
    return BlockRemoved([name], Medium.DEVICE)


def test_one_turn_of_the_loop_is_one_batch() -> None:
    async def main() -> None:
        publisher = Publisher()
        feed = EventFeed(publisher)
        feed(removed(b"a"))
        feed(removed(b"b"))
        assert publisher.batches == []
        await asyncio.sleep(0)
        feed(AllBlocksCleared())
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        assert publisher.batches == [[removed(b"a"), removed(b"b")], [AllBlocksCleared()]]
        feed(removed(b"c"))
        feed.close()
        await asyncio.sleep(1)
        assert publisher.closed
        assert publisher.batches[2:] == [[removed(b"c")]]
        assert (feed.sent, feed.dropped) == (3, 3)

    run(main())
