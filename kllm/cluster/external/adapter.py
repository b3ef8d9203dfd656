"""Adapter: an external engine as an instance. Link towards the gateway, HTTP towards the engine.

        gateway ── Submit, Abort ──►  InFlight ── POST /v1/completions ──► engine
                ◄── Deltas ── Outbox ◄──────────── token ids ────────────
                ◄── EngineLoad ── report ◄── EngineWatch ── /health, /metrics
                ◄── CacheDelta ── CacheWatch ◄── KV events (ZeroMQ)

It runs in the gateway's process and loop, and holds nothing that a new one could not find out again. When the engine is
gone, the adapter ends, as an instance that dies: the gateway gives its requests to others and launches it anew, and the
new adapter waits until the engine is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from kllm.cluster.external.block_names import FINGERPRINT
from kllm.cluster.external.cache_watch import CacheWatch
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_facts import EngineFacts, find_out
from kllm.cluster.external.engine_load import engine_load
from kllm.cluster.external.engine_watch import EngineWatch
from kllm.cluster.external.errors import EngineUnavailable, EngineUnusable
from kllm.cluster.external.http_engine import HttpEngine
from kllm.cluster.external.in_flight import InFlight
from kllm.cluster.external.outbox import Outbox
from kllm.messages import (
    Abort,
    CacheCleared,
    CacheDelta,
    CacheDump,
    ClearCache,
    Down,
    Drain,
    Drained,
    Failed,
    Hello,
    Role,
    SetRole,
    Starting,
    Submit,
    Up,
    WatchCache,
)
from kllm.transport.link import Backpressure, Link, LinkClosed

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 2.0  # between attempts to reach an engine that does not answer
REPORT_INTERVAL_S = 1.0


class Adapter:
    """vocab_size: of the model, where it is known; the engine refuses tokens beyond it otherwise."""

    def __init__(
        self,
        link: Link[Down, Up],
        config: ExternalEngine,
        api_key: str | None,
        rng: random.Random,
        vocab_size: int | None = None,
    ) -> None:
        self._link = link
        self._config = config
        self._rng = rng
        self._vocab_size = 2**31 - 1 if vocab_size is None else vocab_size
        self._engine = HttpEngine(config, api_key)
        self._outbox = Outbox(link)
        self._role: Role = "both"
        self._term = 0
        self._heard = False  # the gateway has said something
        self._reports = 0
        self._report_now = asyncio.Event()
        self._draining = asyncio.Event()
        self._beside: set[asyncio.Task[None]] = set()

    async def run(self) -> str:
        """Until the engine or the gateway is gone, or the gateway drains it: the reason. Closes the link."""
        try:
            facts = await self._find_out()
            return await self._serve(facts)
        except LinkClosed:
            return "the gateway closed the link"
        except EngineUnusable as error:
            await self._last_words(Failed(error=str(error)))
            return str(error)
        except Exception as error:
            logger.exception("the adapter of %s failed", self._config.url)
            reason = f"the adapter of {self._config.url} failed: {error!r}"
            await self._last_words(Failed(error=reason))
            return reason
        finally:
            await self._engine.close()
            self._link.close()

    async def _last_words(self, message: Up) -> None:
        with suppress(LinkClosed):
            self._outbox.put(message)
            await self._outbox.flush()

    # -- start -----------------------------------------------------------------------------------------------

    async def _find_out(self) -> EngineFacts:
        """Waits until the engine answers. Raises EngineUnusable, LinkClosed."""
        wait, told = FIRST_WAIT_S, ""
        while True:
            try:
                return await find_out(self._engine, self._config)
            except EngineUnavailable as error:
                if str(error) != told:
                    told = str(error)
                    logger.info("waiting for the external engine: %s", told)
                self._outbox.put(Starting(phase=f"waiting for the external engine: {told}"))
                await self._outbox.flush()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _hello(self, facts: EngineFacts) -> Hello:
        return Hello(
            instance_id=self._config.url,
            incarnation=uuid.uuid4().hex,
            model=facts.model,
            max_model_len=facts.max_model_len,
            vocab_size=self._vocab_size,
            num_blocks=facts.num_blocks,
            block_tokens=facts.block_tokens,
            max_num_seqs=self._config.max_requests,
            operators=f"{facts.title} over HTTP",
            fingerprint=FINGERPRINT,
            resumes=False,
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def _serve(self, facts: EngineFacts) -> str:
        """Raises LinkClosed, EngineUnusable."""
        watch = EngineWatch(self._engine, facts.baseline)
        try:
            cache = CacheWatch(self._config, FINGERPRINT, facts.block_tokens, self._send_cache)
        except OSError as error:
            raise EngineUnusable(f"{self._config.url}: {error}") from error
        in_flight = InFlight(
            self._engine,
            facts,
            self._outbox,
            self._rng,
            most=self._config.max_requests,
            is_alive=watch.is_alive,
            on_sent=lambda submit: cache.sent(submit.request.cache_salt),
            on_answered=lambda submit: cache.answered(len(submit.request.prompt_token_ids)),
        )
        try:
            return await self._run_until_over(facts, watch, cache, in_flight)
        finally:
            await in_flight.close()
            await watch.close()
            cache.close()
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)

    async def _run_until_over(
        self, facts: EngineFacts, watch: EngineWatch, cache: CacheWatch, in_flight: InFlight
    ) -> str:
        gone, drained = asyncio.ensure_future(watch.run()), asyncio.ensure_future(self._drain(in_flight))
        work = (
            self._receive(in_flight, cache),
            self._report(self._hello(facts), facts, watch, cache, in_flight),
            self._outbox.run(),
        )
        tasks = [gone, drained, *(asyncio.ensure_future(each) for each in work)]
        following = asyncio.ensure_future(cache.run())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {gone, drained}:
                task.result()
        finally:
            for task in (*tasks, following):
                task.cancel()
            await asyncio.gather(*tasks, following, return_exceptions=True)
        if drained in done:
            await self._last_words(Drained())
            return "drained"
        return gone.result()

    async def _drain(self, in_flight: InFlight) -> None:
        await self._draining.wait()
        await in_flight.wait_empty()

    # -- messages --------------------------------------------------------------------------------------------

    async def _receive(self, in_flight: InFlight, cache: CacheWatch) -> None:
        while True:
            message = await self._link.recv()
            self._heard = True
            match message:
                case Submit():
                    in_flight.submit(message)
                case Abort():
                    in_flight.abort(message)
                case SetRole():
                    if message.term > self._term:
                        self._role, self._term = message.role, message.term
                        self._report_now.set()
                case WatchCache():
                    cache.watch()
                case ClearCache():
                    self._start(self._clear_cache(message))
                case Drain():
                    self._draining.set()

    async def _clear_cache(self, message: ClearCache) -> None:
        complete, told = False, None
        try:
            complete = await self._engine.clear_cache(message.store)
        except (EngineUnavailable, EngineUnusable) as error:
            told = str(error)
        self._outbox.put(CacheCleared(token=message.token, complete=complete, error=told))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _send_cache(self, message: CacheDelta | CacheDump) -> bool:
        try:
            self._link.send(message)
        except (Backpressure, LinkClosed):
            return False
        return True

    # -- reports ---------------------------------------------------------------------------------------------

    async def _report(
        self, hello: Hello, facts: EngineFacts, watch: EngineWatch, cache: CacheWatch, in_flight: InFlight
    ) -> None:
        while True:
            if not self._heard:
                self._outbox.put(hello)
            self._reports += 1
            self._report_now.clear()
            load = engine_load(in_flight, watch, facts.baseline, asyncio.get_running_loop().time())
            self._outbox.put(
                msgspec.structs.replace(
                    load,
                    role=self._role,
                    term=self._term,
                    sequence=self._reports,
                    cache_sequence=cache.sequence,
                    progress=in_flight.progress(),
                )
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._report_now.wait(), REPORT_INTERVAL_S)
