"""EventFeed: from the caches to the publisher. What one turn of the event loop has changed is one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kllm.cache.events import CacheEvent
from kllm.transport.event_publisher import PublisherCounts


class Publisher(Protocol):
    """EventPublisher, as far as it is needed here."""

    counts: PublisherCounts

    def publish(self, events: Sequence[CacheEvent]) -> None: ...

    def close(self) -> None: ...


class EventFeed:
    """An EventSink, called on the event loop's thread only. Made while the loop runs."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._loop = asyncio.get_running_loop()
        self._batch: list[CacheEvent] = []

    @property
    def sent(self) -> int:
        """Messages."""
        return self._publisher.counts.sent

    @property
    def dropped(self) -> int:
        """Batches that were given up."""
        return self._publisher.counts.dropped + self._publisher.counts.failed

    def __call__(self, event: CacheEvent) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(event)

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._publisher.publish(batch)

    def close(self) -> None:
        """What is left is published; takes a moment."""
        self._flush()
        self._publisher.close()
