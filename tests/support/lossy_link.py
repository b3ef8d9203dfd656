"""A link that loses, repeats and reorders messages, as told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from kllm.messages import Message
from kllm.transport.link import Backpressure, In, Link, LinkClosed, Out


@dataclass
class Weather:
    """Probabilities per message. delay_s: how much later a late or repeated one arrives, at most. cut: all are lost.

    drop: loses the messages for which it is true; they are counted in `dropped`."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    delay_s: float = 0.2
    cut: bool = False
    drop: Callable[[Message], bool] = lambda _: False
    dropped: int = 0


class LossyLink(Generic[In, Out]):
    """One end; both ends of a link lose what they send."""

    def __init__(self, inner: Link[In, Out], weather: Weather) -> None:
        self._inner = inner
        self._weather = weather

    def send(self, message: Out) -> None:
        weather, rng = self._weather, self._weather.rng
        if weather.drop(message) or weather.cut or rng.random() < weather.lose:
            weather.dropped += 1
            return
        if rng.random() < weather.repeat:
            self._later(message)
        if rng.random() < weather.late:
            self._later(message)
        else:
            self._inner.send(message)

    def _later(self, message: Out) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._weather.rng.uniform(0.0, self._weather.delay_s), self._arrive, message)

    def _arrive(self, message: Out) -> None:
        try:
            self._inner.send(message)
        except (LinkClosed, Backpressure):
            pass  # nobody is there to take it

    async def recv(self) -> In:
        return await self._inner.recv()

    def close(self) -> None:
        self._inner.close()
