"""ExternalLauncher: the InstanceLauncher of an engine that somebody else has started."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from urllib.parse import urlsplit

from kllm.cluster.external.adapter import Adapter
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.launchers.launcher import VisitingLauncher
from kllm.messages import Down, Up
from kllm.transport.memory import MemoryLink, memory_pair

logger = logging.getLogger(__name__)

LINK_CAPACITY = 4096  # messages
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class ExternalInstance:
    """One adapter's life. The engine itself is neither started nor stopped."""

    def __init__(self, link: MemoryLink[Up, Down], adapter: Adapter, url: str) -> None:
        self.link = link
        self._url = url
        self._life = asyncio.create_task(adapter.run())

    async def wait(self) -> str:
        try:
            return await asyncio.shield(self._life)
        except asyncio.CancelledError:
            if not self._life.cancelled():
                raise  # it is the waiting that was cancelled
            return f"the adapter of {self._url} was stopped"

    async def stop(self, grace_s: float) -> None:
        """Ends its requests at the engine; nothing needs grace_s."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        self.link.close()


class ExternalLauncher(VisitingLauncher):
    """One incarnation lasts while the engine does; the next waits for it to be back.

    vocab_size: of the model, where the gateway knows it from a tokenizer. rng: draws pauses before a busy engine is
    asked again. Raises ValueError where the environment variable of the API key is not set.
    """

    def __init__(
        self, config: ExternalEngine, *, vocab_size: int | None = None, rng: random.Random | None = None
    ) -> None:
        self.address = config.url
        self._config = config
        self._vocab_size = vocab_size
        self._rng = rng or random.Random()
        self._api_key: str | None = None
        if config.api_key_env is not None:
            self._api_key = os.environ.get(config.api_key_env)
            if not self._api_key:
                raise ValueError(f"api_key_env: the environment variable {config.api_key_env} is not set")
            host = urlsplit(config.url).hostname
            if config.url.startswith("http:") and host not in LOOPBACK:
                logger.warning("the API key of %s travels unencrypted", config.url)

    async def launch(self) -> ExternalInstance:
        near, far = memory_pair(LINK_CAPACITY)
        adapter = Adapter(far, self._config, self._api_key, self._rng, self._vocab_size)
        return ExternalInstance(near, adapter, self._config.url)
