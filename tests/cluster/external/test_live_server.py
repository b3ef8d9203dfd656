"""Our own server in the role of an external engine, with its KV events: over HTTP and ZeroMQ only."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

from support import foreign_engine
from support.live_server import HANG_S, LiveServer

from kllm.cluster.cache_directory import prompt_hashes
from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.launcher import ExternalLauncher
from kllm.cluster.gateway import Gateway
from kllm.request import Request, SamplingParams

FLAGS = ("--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", "--num-kv-blocks", "40")
PROMPT = list(range(3, 120))


def request(name: str, prompt: list[int], *, tokens: int = 8, salt: str = "", **params: float) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=prompt, params=sampling, cache_salt=salt)


async def until(condition: Callable[[], bool]) -> None:
    await foreign_engine.until(condition, HANG_S)


def expected(server: LiveServer, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.complete(body).token_ids


def test_an_external_server_and_its_cache(live_model: Path, tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publishing = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    with LiveServer(live_model, *FLAGS, "--kv-events-config", json.dumps(publishing)) as server:
        config = ExternalEngine(url=server.url, kv_events=events, replay=replay)
        wanted = expected(server, PROMPT)  # before anybody subscribes: replayed later
        asyncio.run(_follow(config, wanted))


async def _follow(config: ExternalEngine, wanted: list[int]) -> None:
    gateway = Gateway([ExternalLauncher(config, vocab_size=288)], rng=random.Random(1), router=CacheAware())
    await gateway.start()
    try:
        info, directory = gateway.info, gateway.directory
        assert info is not None
        assert directory is not None
        assert info.operators.startswith("kLLM ")

        def known(prompt: list[int], salt: str = "") -> int:
            """Blocks of it that the engine has said it holds, not those that are only expected there."""
            hashes = prompt_hashes(request("x", prompt, salt=salt), info.fingerprint, info.block_tokens)
            return int(directory._index.matches(hashes).l1[0])

        await until(lambda: known(PROMPT) == len(PROMPT) // info.block_tokens)
        deltas = [delta async for delta in gateway.generate(request("a", PROMPT))]
        assert [token for delta in deltas for token in delta.token_ids] == wanted
        assert deltas[0].num_cached_tokens >= 96

        salted = [delta async for delta in gateway.generate(request("b", PROMPT, salt="pepper"))]
        assert salted[0].num_cached_tokens == 0
        await until(lambda: known(PROMPT, "pepper") == len(PROMPT) // info.block_tokens)

        for number in range(8):  # more than the cache holds: the first goes, and the gateway hears of it
            other = [number + 200] * len(PROMPT)
            [delta async for delta in gateway.generate(request(f"c{number}", other))]
        await until(lambda: known(PROMPT) == 0)
        await _draw_alike(gateway)
    finally:
        await gateway.close()


async def _draw_alike(gateway: Gateway) -> None:
    """A sampled stream that is continued after some outputs draws what it would have drawn."""
    whole = request("whole", PROMPT, tokens=12, temperature=1.0, seed=5)
    tokens = [token async for delta in gateway.generate(whole) for token in delta.token_ids]
    stream = gateway.generate(request("cut", PROMPT, tokens=12, temperature=1.0, seed=5))
    stream.outputs += tokens[:4]  # as if an instance had died after them
    gateway._on_astray(stream, "the test says so")
    rest = [token async for delta in stream for token in delta.token_ids]
    assert rest[-8:] == tokens[4:]
