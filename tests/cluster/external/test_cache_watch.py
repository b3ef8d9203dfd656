"""From an engine's KV events, over ZeroMQ, to reports for the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import foreign_engine

from kllm.cache.event_wire import open_publisher
from kllm.cache.events import BlockRemoved, BlockStored, CacheEvent, Medium
from kllm.cluster.cache_directory import CacheDirectory, prompt_hashes
from kllm.cluster.external.cache_watch import SILENT_PROMPTS, CacheWatch
from kllm.cluster.external.config import ExternalEngine
from kllm.events_config import KVEventsConfig
from kllm.messages import CacheDelta, CacheDump
from kllm.request import Request, SamplingParams
from kllm.transport.event_publisher import EventPublisher

BLOCK = 4
TOKENS = list(range(100, 112))
THEIRS = [b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"]
STORED = BlockStored(THEIRS, None, TOKENS, BLOCK, Medium.DEVICE)


class Listening:
    """A CacheWatch and the directory that hears its reports."""

    def __init__(self, folder: Path, *, events: bool = True, replay: bool = True) -> None:
        endpoints = {"kv_events": f"ipc://{folder}/e"} if events else {}
        endpoints |= {"replay": f"ipc://{folder}/r"} if events and replay else {}
        self.directory = CacheDirectory(1)
        self.gaps = 0
        config = ExternalEngine(url="http://127.0.0.1:1", **endpoints)  # type: ignore[arg-type]
        self.watch = CacheWatch(config, "f", BLOCK, self._send)
        self.watch.watch()

    def _send(self, report: CacheDelta | CacheDump) -> bool:
        self.gaps += not self.directory.heard(0, report)
        return True

    def known(self, tokens: list[int] = TOKENS, salt: str = "") -> int:
        request = Request(request_id="r", prompt_token_ids=tokens, params=SamplingParams(), cache_salt=salt)
        return int(self.directory.matches(prompt_hashes(request, "f", BLOCK)).l1[0])

    async def hears(self, blocks: int, salt: str = "") -> None:
        await until(lambda: self.known(salt=salt) == blocks)


async def until(condition: Callable[[], bool]) -> None:
    await foreign_engine.until(condition, 60.0)


def publisher(folder: Path) -> EventPublisher[CacheEvent]:
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{folder}/e", replay_endpoint=f"ipc://{folder}/r"
    )
    opened = open_publisher(config)
    assert opened is not None
    return opened


def following(listening: Listening, work: Callable[[], Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, None]:
    async def main() -> None:
        task = asyncio.create_task(listening.watch.run())
        try:
            await work()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            listening.watch.close()

    return main()


def test_what_the_engine_caches_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        engine = publisher(tmp_path)
        engine.publish([STORED])  # before anybody listens: repeated on request
        listening = Listening(tmp_path)

        async def work() -> None:
            await listening.hears(3)
            engine.publish([BlockRemoved([THEIRS[2]], Medium.DEVICE)])
            await listening.hears(2)
            assert listening.gaps == 0

        await following(listening, work)
        engine.close()

    asyncio.run(main())


def test_events_that_cannot_be_followed_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was known grows old from then on, so that it is forgotten."""

    def fail(event: CacheEvent) -> list[CacheEvent]:
        raise OSError("no such endpoint")

    async def main() -> None:
        engine = publisher(tmp_path)
        engine.publish([STORED])
        listening = Listening(tmp_path)

        async def work() -> None:
            await listening.hears(3)
            monkeypatch.setattr(listening.watch.names, "translate", fail)
            engine.publish([BlockRemoved([THEIRS[2]], Medium.DEVICE)])
            await listening.hears(0)
            assert listening.gaps == 0

        await following(listening, work)
        engine.close()

    asyncio.run(main())
    assert "cannot be followed any more" in caplog.text
    assert "no such endpoint" in caplog.text


def test_salts_that_the_engine_does_not_tell(tmp_path: Path) -> None:
    """Our own engine publishes a hash of the salt. The adapter knows what it has sent."""

    async def main() -> None:
        engine = publisher(tmp_path)
        listening = Listening(tmp_path)
        listening.watch.sent("pepper")

        async def work() -> None:
            engine.publish([BlockStored(THEIRS, None, TOKENS, BLOCK, Medium.DEVICE, salt="pepper")])
            await listening.hears(3, "pepper")
            assert listening.known() == 0

        await following(listening, work)
        engine.close()

    asyncio.run(main())


def test_a_restarted_engine_has_an_empty_cache(tmp_path: Path) -> None:
    async def main() -> None:
        engine = publisher(tmp_path)
        listening = Listening(tmp_path)

        async def work() -> None:
            engine.publish([STORED])
            await listening.hears(3)
            engine.close()
            again = publisher(tmp_path)
            again.publish([BlockStored(THEIRS[:1], None, TOKENS[:4], BLOCK, Medium.DEVICE)])
            await listening.hears(1)
            again.close()

        await following(listening, work)

    asyncio.run(main())


def test_lost_events_cost_what_they_said_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = publisher(tmp_path)
        listening = Listening(tmp_path, replay=False)

        async def work() -> None:
            while not engine.wait_for_subscribers(1, 0.0):  # noqa: ASYNC110 - the publisher has a thread of its own
                await asyncio.sleep(0.01)
            engine.publish([BlockStored(THEIRS[:1], None, TOKENS[:4], BLOCK, Medium.DEVICE)])
            await listening.hears(1)
            engine._sequence += 2  # two batches that nobody will ever see
            engine.publish([BlockStored(THEIRS[2:], THEIRS[1], TOKENS[8:], BLOCK, Medium.DEVICE)])
            engine.publish([BlockStored(THEIRS[1:], THEIRS[0], TOKENS[4:], BLOCK, Medium.DEVICE)])
            await listening.hears(3)
            assert listening.watch.names.counts.unnamed == 1

        await following(listening, work)
        engine.close()

    asyncio.run(main())
    assert "KV events 1 to 2 are lost" in caplog.text


def test_a_silent_publisher_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        listening = Listening(tmp_path)
        for _ in range(SILENT_PROMPTS - 1):
            listening.watch.answered(BLOCK)
            listening.watch.answered(BLOCK - 1)  # leaves no whole block behind
        assert not caplog.records
        listening.watch.answered(BLOCK)
        listening.watch.close()

    asyncio.run(main())
    assert "publishes no KV events" in caplog.text


def test_blocks_of_another_size_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = publisher(tmp_path)
        listening = Listening(tmp_path)

        async def work() -> None:
            engine.publish([BlockStored(THEIRS[:1], None, TOKENS[:8], 8, Medium.DEVICE)])
            await until(lambda: "set block_size" in caplog.text)

        await following(listening, work)
        engine.close()

    asyncio.run(main())


def test_without_events_reports_are_empty(tmp_path: Path) -> None:
    async def main() -> None:
        listening = Listening(tmp_path, events=False)
        await listening.watch.run()
        assert listening.directory.knows(0)
        assert listening.known() == 0
        listening.watch.close()

    asyncio.run(main())
