"""`kllm serve --prefill P --decode D`: requests move from one process to another, and say what they would have said.

Operators that compute the same bits in any batch make this exact.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.live_server import CHAT, TEXT, LiveServer, Output, wait_until

FLAGS = (
    "--threads",
    "1",
    "--dtype",
    "float32",
    "--kernels",
    "invariant",
    "--num-kv-blocks",
    "600",
    "--fetch-base-s",
    "30",
)
POOLS = ("--prefill", "2", "--decode", "2")
WORDS = ("the", "end", "of", "line", "and", "then", "on", "how", "sure", "all", "them", "over", "again")
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 30}


def prompt(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def mixed(index: int) -> tuple[str, dict[str, Any]]:
    """A request of some kind; every fourth begins like others do."""
    rng = random.Random(index)
    text = prompt(index % 3, 80) + prompt(index, 20) if index % 4 == 0 else prompt(index, rng.choice((3, 40, 150)))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 60)), "ignore_eos": True, "return_token_ids": True}
    kind = index % 5
    if kind == 0:
        body["temperature"] = 0
    else:
        body |= {"temperature": 1.0, "seed": index}
    if kind == 2:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2}
    if kind == 3:
        schema = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}
        body |= {"response_format": schema, "ignore_eos": False, "max_tokens": 300}
        return CHAT, {**body, "messages": [{"role": "user", "content": text}]}
    return TEXT, {**body, "prompt": text}


REQUESTS = [mixed(index) for index in range(40)]


def ask(server: LiveServer, request: tuple[str, dict[str, Any]]) -> Output:
    path, body = request
    output = server.complete(body, path)
    if output.usage is not None:
        output.usage.pop("prompt_tokens_details", None)  # what was cached differs
    return output


def ask_all(server: LiveServer, requests: list[tuple[str, dict[str, Any]]], at_once: int) -> list[Output]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: ask(server, request), requests))


@pytest.fixture(scope="module")
def expected(live_model: Path) -> list[Output]:
    """What a single instance says."""
    with LiveServer(live_model, *FLAGS) as server:
        return ask_all(server, REQUESTS, 8)


@pytest.fixture(scope="module")
def server(live_model: Path) -> Iterator[LiveServer]:
    with LiveServer(live_model, *FLAGS, *POOLS) as running:
        wait_until(lambda: "(4 of 4)" in running.log, "all instances join")
        yield running
        assert "Traceback" not in running.log


def test_says_what_a_single_instance_says(server: LiveServer, expected: list[Output]) -> None:
    assert " 4 instances," in server.ready_line
    assert ask_all(server, REQUESTS, 8) == expected
    wait_until(lambda: server.metrics()["kllm:kv_transfer_blocks_total"] > 0, "KV moved between processes")
    assert server.metrics()["kllm:kv_transfer_failures_total"] == 0
    server.wait_idle()


def test_pools_need_both_sides(live_model: Path) -> None:
    with (
        pytest.raises(AssertionError, match="prefill and decode go together"),
        LiveServer(live_model, "--prefill", "1"),
    ):
        pass


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_kill_either_side_while_requests_run(live_model: Path, expected: list[Output]) -> None:
    """kill -9 of two of each pool, one after the other, under load: every stream says what it would have said."""
    before = shared_memory()
    with LiveServer(live_model, *FLAGS, *POOLS) as server:
        wait_until(lambda: "(4 of 4)" in server.log, "all instances join")
        rng, over = random.Random(4), threading.Event()
        killed: list[int] = []

        def kill_now_and_then() -> None:
            while not over.wait(1.5):
                alive = server.instances()
                if len(alive) == 4:
                    victim = rng.choice(alive)
                    killed.append(victim.pid)
                    victim.kill()

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            outputs = ask_all(server, REQUESTS, 8)
        finally:
            over.set()
            killer.join()
        assert killed
        assert outputs == expected
        server.wait_idle()
        assert "Traceback" not in server.log
    assert shared_memory() <= before


# -- the real model ---------------------------------------------------------------------------------------------------

REAL = (
    "--threads",
    "1",
    "--dtype",
    "float32",
    "--kernels",
    "cpu",
    "--max-model-len",
    "2048",
    "--kv-cache-memory",
    "1GiB",
)
KILLING_S = 180.0


@pytest.fixture(scope="module")
def said_alone() -> list[Output]:
    with LiveServer("smollm2", *REAL) as server:
        return ask_all(server, real_requests(), 8)


def real_requests() -> list[tuple[str, dict[str, Any]]]:
    return [mixed(index) for index in range(200)]


@pytest.mark.slow
def test_smollm2_says_what_a_single_instance_says(said_alone: list[Output]) -> None:
    with LiveServer("smollm2", *REAL, *POOLS) as server:
        wait_until(lambda: "(4 of 4)" in server.log, "all instances join")
        assert ask_all(server, real_requests(), 8) == said_alone
        wait_until(lambda: server.metrics()["kllm:kv_transfer_blocks_total"] > 0, "handovers are reported")


@pytest.mark.slow
def test_smollm2_kill_at_random_for_three_minutes(said_alone: list[Output]) -> None:
    """An instance dies every 10 to 20 seconds; every request that is sent meanwhile ends right."""
    before = shared_memory()
    requests, rng = real_requests(), random.Random(7)
    with LiveServer("smollm2", *REAL, *POOLS) as server:
        wait_until(lambda: "(4 of 4)" in server.log, "all instances join")
        end = time.monotonic() + KILLING_S
        over = threading.Event()
        deaths = 0

        def kill_now_and_then() -> None:
            nonlocal deaths
            while not over.wait(rng.uniform(10, 20)):
                alive = server.instances()
                if alive:
                    rng.choice(alive).kill()
                    deaths += 1

        def client(number: int) -> list[tuple[int, Output]]:
            done = []
            index = number
            while time.monotonic() < end:
                done.append((index, ask(server, requests[index])))
                index = (index + 8) % len(requests)
            return done

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                answered = [entry for part in pool.map(client, range(8)) for entry in part]
        finally:
            over.set()
            killer.join()
        assert deaths >= 8
        wrong = [index for index, output in answered if output != said_alone[index]]
        assert not wrong, f"{len(wrong)} of {len(answered)} say something else"
        server.wait_idle()
        assert "Traceback" not in server.log
        print(f"{len(answered)} requests, {deaths} deaths")
    assert shared_memory() <= before
