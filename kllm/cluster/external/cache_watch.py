"""Tells the gateway what an external engine caches, as far as the engine says so."""

from __future__ import annotations

import logging

from kllm.cache.event_wire import salt_tag, subscribe
from kllm.cache.events import CacheEvent, Medium
from kllm.cluster.external.block_names import BlockNames
from kllm.cluster.external.config import ExternalEngine
from kllm.engine.cache_reports import CacheReporter, Send, change
from kllm.messages import CacheChange
from kllm.transport.event_subscriber import EventSubscriber, Lost, Received, Restarted

logger = logging.getLogger(__name__)

SALTS_REMEMBERED = 4096
SILENT_PROMPTS = 8  # that must have left blocks behind, before a publisher that says nothing is suspected


class CacheWatch:
    """Without KV events its reports are empty: then the gateway goes by what it has sent where.

    Raises OSError for an endpoint that cannot be subscribed to. send: as CacheReporter's."""

    def __init__(self, config: ExternalEngine, fingerprint: str, block_tokens: int, send: Send) -> None:
        self.names = BlockNames(fingerprint, block_tokens, salt_of=self._salt_of)
        self._config = config
        self._block_tokens = block_tokens
        self._salts: dict[str, str] = {}  # by their tag, oldest first
        self._prompts = 0  # with whole blocks, before the first event
        self._reporter = CacheReporter()
        self._reporter.connect(send, self._contents)
        self._subscriber: EventSubscriber[CacheEvent] | None = None
        if config.kv_events is not None:
            self._subscriber = subscribe(config.kv_events, config.replay, config.kv_topic)

    @property
    def sequence(self) -> int:
        """Of the latest report."""
        return self._reporter.sequence

    def watch(self) -> None:
        """The gateway asks what is there, and from now on wants to hear of changes."""
        self._reporter.watch()

    def sent(self, salt: str) -> None:
        """A request with this salt is on its way to the engine."""
        if salt:
            self._salts[salt_tag(salt)] = salt
            if len(self._salts) > SALTS_REMEMBERED:
                del self._salts[next(iter(self._salts))]

    def answered(self, prompt_tokens: int) -> None:
        """A request has ended well: the engine should have told of its blocks by and by."""
        if self._subscriber is None or self._subscriber.counts.received or prompt_tokens < self._block_tokens:
            return
        self._prompts += 1
        if self._prompts == SILENT_PROMPTS:
            logger.warning(
                "%s publishes no KV events at %s: requests are routed by what was sent where",
                self._config.url,
                self._config.kv_events,
            )

    async def run(self) -> None:
        """Follows the events until it is cancelled; returns where there are none, or where that fails, which costs what
        is known of the cache and nothing else."""
        if self._subscriber is None:
            return
        try:
            await self._follow(self._subscriber)
        except Exception:
            logger.exception(
                "the KV events of %s cannot be followed any more: requests are routed by what was sent where",
                self._config.url,
            )
            self._report(self.names.clear())

    async def _follow(self, subscriber: EventSubscriber[CacheEvent]) -> None:
        async for item in subscriber:
            match item:
                case Received(events=events):
                    for event in events:
                        self._report(self.names.translate(event))
                    self._warn_of_sizes()
                case Lost(first=first, last=last):
                    logger.warning("%s: KV events %d to %d are lost", self._config.url, first, last)
                    self.names.doubt()
                case Restarted():
                    self._report(self.names.clear())

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()

    def _report(self, events: list[CacheEvent]) -> None:
        for event in events:
            self._reporter(event)

    def _contents(self) -> list[CacheChange]:
        return [change(1, True, self.names.held(Medium.DEVICE)), change(2, True, self.names.held(Medium.HOST))]

    def _salt_of(self, tag: str) -> str:
        return self._salts.get(tag, tag)

    def _warn_of_sizes(self) -> None:
        counts = self.names.counts
        if counts.other_size and not len(self.names):
            logger.warning(
                "%s: its KV events tell of blocks that do not have %d tokens: set block_size",
                self._config.url,
                self._block_tokens,
            )
            counts.other_size = 0
