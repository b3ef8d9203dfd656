"""An external engine without sockets, for adapters in virtual time: what HttpEngine offers, and trouble on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from support.foreign_engine import continuation

from kllm.cluster.external import adapter
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.errors import EngineBusy, EngineFault, EngineUnavailable
from kllm.cluster.external.http_engine import ModelCard
from kllm.cluster.external.launcher import ExternalLauncher
from kllm.cluster.gateway import Gateway

WELL_KNOWN_PROMPT = [1]  # of the completion that every adapter tries at its start


class VirtualEngine:
    """Tokens as ForeignEngine's.

    busy: completions are refused, with this Retry-After in seconds; None: they are taken. failing: they are answered
    500. prefill_s, step_s: seconds to the first token, and to each. well: whether /health is.
    asked: (time, body) of the completions that were wanted, refused ones included."""

    def __init__(self, url: str = "http://engine", *, model: str = "theirs", max_model_len: int = 2000) -> None:
        self.url = url
        self.busy: float | None = None
        self.failing = False
        self.prefill_s = self.step_s = 0.0
        self.well = True
        self.told: EngineMetrics | None = EngineMetrics(block_tokens=4, num_blocks=500)
        self.asked: list[tuple[float, dict[str, Any]]] = []
        self._card = ModelCard(id=model, owned_by="vllm", max_model_len=max_model_len)

    async def card(self, wanted: str | None) -> ModelCard:
        return self._card

    async def version(self) -> str:
        return "9.9"

    async def metrics(self) -> EngineMetrics | None:
        return self.told

    async def check_health(self) -> None:
        if not self.well:
            raise EngineUnavailable("not well", certain=True)

    async def clear_cache(self, store: bool) -> bool:
        return True

    async def close(self) -> None:
        pass

    async def complete(self, body: bytes, request_id: str) -> AsyncGenerator[bytes, None]:
        wanted = json.loads(body)
        if wanted["prompt"] != WELL_KNOWN_PROMPT:
            self.asked.append((asyncio.get_running_loop().time(), wanted))
            if self.busy is not None:
                raise EngineBusy("the engine answers 429", self.busy)
            if self.failing:
                raise EngineFault("the engine answers 500", status=500)
            await asyncio.sleep(self.prefill_s)
        tokens = continuation(wanted["prompt"], wanted["max_tokens"])
        for index, token in enumerate(tokens):
            await asyncio.sleep(self.step_s)
            reason = "length" if index == len(tokens) - 1 else None
            choice = {"index": 0, "text": "x", "token_ids": [token], "finish_reason": reason}
            yield json.dumps({"choices": [choice]}).encode()


@contextlib.asynccontextmanager
async def gateway_over(
    monkeypatch: pytest.MonkeyPatch, *engines: VirtualEngine, **options: Any
) -> AsyncIterator[Gateway]:
    """All are ready; the gateway's books balance on leaving."""
    by_url = {engine.url: engine for engine in engines}
    monkeypatch.setattr(adapter, "HttpEngine", lambda config, api_key: by_url[config.url])
    launchers = [
        ExternalLauncher(ExternalEngine(url=engine.url), vocab_size=1000, rng=random.Random(1)) for engine in engines
    ]
    gateway = Gateway(launchers, rng=random.Random(1), **options)
    await gateway.start()
    try:
        await asyncio.sleep(1.0)
        assert all(slot.ready for slot in gateway.slots)
        yield gateway
        gateway.check()
    finally:
        await gateway.close()
        gateway.check()
