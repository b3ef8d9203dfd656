"""kill -9 of the instance while it copies its cache downwards, and stores that fail: every request says what it would
have said, and nothing damaged is ever served."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.live_server import TEXT, LiveServer, wait_until
from support.mooncake_master import MooncakeMaster

from kllm.cache.stores.inspection import verify

PROMPTS = 12
# A busy disk must not make a request go on without what is stored: hits are counted here.
PATIENT = ("--fetch", "always", "--fetch-base-s", "30")
FLAGS = ("--threads", "1", "--dtype", "float32", "--kernels", "invariant", *PATIENT)
SMALL = ("--num-kv-blocks", "60", "--l2-memory", "8MiB")


def prompts() -> list[str]:
    return [f"{'once upon a time ' * (3 + number % 4)}there were {number} " for number in range(PROMPTS)]


def body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def ask(server: LiveServer) -> list[str]:
    """The outputs of all prompts, sent four at a time."""

    def one(prompt: str) -> str:
        with server.client() as client:
            reply = client.post(TEXT, json=body(prompt))
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, prompts()))


def written(folder: Path) -> int:
    """Bytes of the store's files that are used."""
    return sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file() and path.suffix != ".mdb")


@pytest.fixture(scope="module")
def expected(live_model: Path) -> list[str]:
    """Without any cache."""
    with LiveServer(live_model, *FLAGS, "--no-enable-prefix-caching") as server:
        return ask(server)


def ask_and_kill(server: LiveServer, folder: Path) -> list[str]:
    """As ask(); the instance is killed when something more has been stored."""
    before = written(folder)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, server)
        wait_until(lambda: written(folder) > before or asking.done(), "something is stored")
        if not asking.done():
            server.kill_instance()
        return asking.result()


def test_killed_while_it_copies_down(live_model: Path, tmp_path: Path, expected: list[str]) -> None:
    folder = tmp_path / "store"
    with LiveServer(live_model, *FLAGS, *SMALL, "--l3", str(folder)) as server:
        for _ in range(3):
            assert ask_and_kill(server, folder) == expected
        assert ask(server) == expected
    findings = verify(folder, repair=False, on_pages=lambda count: None)
    assert findings.pages > 0
    assert not findings.bad
    with LiveServer(live_model, *FLAGS, *SMALL, "--l3", str(folder)) as server:
        assert ask(server) == expected
        wait_until(lambda: server.metrics()["kllm:prefix_cache_tier_hits_total:l3"] > 0, "L3 is reported to hit")


def test_a_store_that_goes_away(live_model: Path, tmp_path: Path, expected: list[str]) -> None:
    """Its folder is deleted under a running server: requests complete, and the log says so."""
    folder = tmp_path / "store"
    with LiveServer(live_model, *FLAGS, *SMALL, "--l3", str(folder)) as server:
        assert ask(server) == expected
        deleting = threading.Thread(target=shutil.rmtree, args=(folder, True))
        deleting.start()
        assert ask(server) == expected
        deleting.join()
        assert ask(server) == expected
        assert "Traceback" not in server.log


def test_the_master_is_killed(live_model: Path, expected: list[str]) -> None:
    """Mooncake: what one instance stored another finds; without its master every request still completes."""
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed (make mooncake)", exc_type=ImportError)
    with MooncakeMaster() as master:
        flags = (*FLAGS, "--num-kv-blocks", "60", "--l3", f"mooncake://{master.address}", "--l3-capacity", "64MiB")
        with LiveServer(live_model, *flags) as first:
            assert ask(first) == expected
            with LiveServer(live_model, *flags) as second:
                assert ask(second) == expected
                wait_until(
                    lambda: second.metrics()["kllm:prefix_cache_tier_hits_total:l3"] > 0, "L3 is reported to hit"
                )
        with LiveServer(live_model, *flags) as server:
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, server)
                master.kill()
                assert asking.result() == expected
            assert ask(server) == expected
            wait_until(lambda: server.metrics()["kllm:cache_store_errors_total"] > 0, "errors are reported")
            assert "KV store:" in server.log
