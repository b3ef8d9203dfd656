"""EngineWatch: asks the engine every second whether it is well, and how loaded it is."""

from __future__ import annotations

import asyncio

from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.errors import EngineUnavailable
from kllm.cluster.external.http_engine import HttpEngine

INTERVAL_S = 1.0
MOST_SILENCES = 3  # in a row: an engine that is busy may not answer in time


class EngineWatch:
    """metrics: the latest; None where there are none. dead: set for good, with the reason, once the engine is gone:
    nobody listens, it says that it is not well, or it did not answer several times in a row.

    signs: times that an engine which does not count its steps said that it is well. They stand for steps: between the
    chunks of a long prompt nothing else can be seen of it, and how long it may be silent is read_timeout's business."""

    def __init__(self, engine: HttpEngine, metrics: EngineMetrics | None) -> None:
        self.metrics = metrics
        self.dead: str | None = None
        self.signs = 0
        self._engine = engine
        self._has_metrics = metrics is not None
        self._silences = 0
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> str:
        """Returns when the engine is dead: the reason."""
        while self.dead is None:
            await asyncio.sleep(INTERVAL_S)
            if await self.is_alive() and self._has_metrics:
                try:
                    self.metrics = await self._engine.metrics() or self.metrics
                except EngineUnavailable:
                    pass  # its health is asked again soon
        return self.dead

    async def is_alive(self) -> bool:
        """As far as can be known now. Whoever asks meanwhile gets the same answer."""
        if self.dead is None:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        return self.dead is None

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        try:
            await self._engine.check_health()
            self._silences = 0
            self.signs += self.metrics is None or not self.metrics.steps
        except EngineUnavailable as error:
            self._silences += 1
            if error.certain or self._silences >= MOST_SILENCES:
                self.dead = str(error)
        finally:
            self._asking = None
