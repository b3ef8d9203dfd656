"""The tiered cache as clients and operators of a running server see it: flushing, isolation, metrics, events."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.event_consumer import EventConsumer, read_batch
from support.live_server import HANG_S, TEXT, LiveServer, serve_command, wait_until

QUICK = ("--threads", "1", "--dtype", "float32", "--num-kv-blocks", "300")
TURNS = ["once upon a time " * 12 + ending for ending in ("there was", "there was a king", "nobody came")]
ALL_GONE = {"complete": True, "error": None}


def tiers(folder: Path) -> tuple[str, ...]:
    return ("--l2-memory", "8MiB", "--l3", str(folder / "store"), "--fetch", "always", "--fetch-base-s", "60")


def cached(client: httpx.Client, key: str = "none", salt: str | None = None, prompts: list[str] = TURNS) -> list[int]:
    """Tokens of each prompt that came from a cache, as its client is told."""
    counts = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
        reply = client.post(TEXT, json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return counts


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """Sum of the samples with these labels."""
    total = 0.0
    for line in client.get("/metrics").text.splitlines():
        found = re.match(rf"kllm:{name}{{(.*)}} (\S+)", line)
        if found and all(f'{label}="{value}"' in found[1] for label, value in labels.items()):
            total += float(found[2])
    return total


def wait_stored(client: httpx.Client) -> None:
    """Until every block of the device is in the store."""

    def stored() -> bool:
        saved = metric(client, "cache_moved_bytes_total", direction="l1_to_l2")
        return 0 < saved == metric(client, "cache_moved_bytes_total", direction="l2_to_l3")

    wait_until(stored, "blocks do not go down")


def test_flushing_memory_and_store(live_model: Path, tmp_path: Path) -> None:
    with LiveServer(live_model, *QUICK, *tiers(tmp_path)) as server, server.client() as client:
        cold = cached(client)
        warm = cached(client)
        assert cold[0] == 0
        assert min(warm) > 0
        wait_stored(client)
        for path in ("/flush_cache", "/reset_prefix_cache"):
            assert client.post(path).json() == {"complete": True, "instances": [{"instance": 0, **ALL_GONE}]}
            before = metric(client, "prefix_cache_tier_hits_total", tier="l3")
            assert cached(client) == warm, "the store still has it"
            wait_until(
                lambda before=before: metric(client, "prefix_cache_tier_hits_total", tier="l3") > before,  # type: ignore[misc]
                "no hit in the store is reported",
            )
        reply = client.post("/reset_prefix_cache?reset_external=true").json()
        assert reply == {"complete": True, "instances": [{"instance": 0, **ALL_GONE}]}
        assert cached(client) == cold
        assert metric(client, "cache_store_errors_total") == 0


def test_clearing_the_store_clears_it_for_all(live_model: Path, tmp_path: Path) -> None:
    flags = (*QUICK, *tiers(tmp_path))
    with LiveServer(live_model, *flags) as server, server.client() as client:
        cold = cached(client)
        wait_stored(client)
        with LiveServer(live_model, *flags, "--instances", "2") as other, other.client() as second:
            assert min(cached(second)) > 0, "servers share the store"
            wait_until(lambda: "(2 of 2)" in other.log, "the second instance does not start")
            reply = second.post("/reset_prefix_cache?reset_external=true").json()
            assert reply["instances"] == [{"instance": index, **ALL_GONE} for index in range(2)]
            assert cached(second)[0] == 0
            assert second.post("/reset_prefix_cache?reset_external=true").json()["complete"]
        assert min(cached(client)) > 0, "it had a copy in memory"
        assert client.post("/flush_cache").json()["complete"]
        assert cached(client) == cold


@pytest.mark.parametrize("share", [False, True], ids=["separate", "shared"])
def test_keys_meet_in_no_tier_unless_they_share(live_model: Path, tmp_path: Path, share: bool) -> None:
    """What a client is told, and what is computed, is the same as with an empty cache."""
    keys = ("--api-key", "first", "--api-key", "second", "--admin-api-key", "boss")
    keys += ("--share-cache-between-keys",) if share else ()
    with LiveServer(live_model, *QUICK, *tiers(tmp_path), *keys) as server, server.client() as client:
        cold = cached(client, "first")
        warm = cached(client, "first")
        assert cold != warm
        expected = warm if share else cold
        assert cached(client, "second") == expected
        assert cached(client, "first", "salt") == cold
        assert cached(client, "second", "salt") == expected
        assert cached(client, "second", "other salt") == cold
        wait_stored(client)
        flushed = client.post("/flush_cache", headers={"Authorization": "Bearer boss"})
        assert flushed.json()["complete"]
        assert cached(client, "first") == warm, "from the store"
        assert cached(client, "first", "third salt") == cold
        assert cached(client, "second", "third salt") == expected
        told = 4 * sum(cold) + 2 * sum(warm) + 3 * sum(expected)
        wait_until(lambda: metric(client, "prefix_cache_hits_total") >= told, "hits are not reported")
        assert metric(client, "prefix_cache_hits_total") == told


# -- events --------------------------------------------------------------------------------------------------


def free_ports(count: int) -> int:
    """The first of some ports in a row that are free now."""
    for first in range(20_000, 30_000, count):
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first
    raise AssertionError("no free ports")


def events(first: int) -> str:
    return json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{first}"})


def test_every_instance_publishes_at_a_port_of_its_own(live_model: Path) -> None:
    flags = (*QUICK, "--l2-memory", "8MiB", "--instances", "2", "--routing", "round-robin")
    port = free_ports(2)
    with (
        LiveServer(live_model, *flags, "--kv-events-config", events(port)) as server,
        server.client() as client,
        EventConsumer(f"tcp://127.0.0.1:{port}", timeout_s=HANG_S) as one,
        EventConsumer(f"tcp://127.0.0.1:{port + 1}", timeout_s=HANG_S) as other,
    ):
        wait_until(lambda: "(2 of 2)" in server.log, "the second instance does not start")
        seen: dict[EventConsumer, set[tuple[str, str | None]]] = {one: set(), other: set()}
        wanted = {("BlockStored", "GPU"), ("BlockStored", "CPU")}
        number = 0
        for consumer, kinds in seen.items():
            while not wanted <= kinds:  # a subscription takes a moment: what came before it is not sent
                cached(client, prompts=[f"{number} " + TURNS[0], f"{number} again " + TURNS[0]])
                number += 1
                kinds |= {(event["type"], event.get("medium")) for event in read_batch(consumer.receive()[2]).events}
        assert metric(client, "cache_event_batches_dropped_total") == 0
        assert client.post("/flush_cache").json()["complete"]
        for consumer in seen:
            while not any(event["type"] == "AllBlocksCleared" for event in read_batch(consumer.receive()[2]).events):
                pass


def test_a_port_that_is_taken_is_told(live_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = taken.getsockname()[1]
        done = subprocess.run(
            [*serve_command(live_model, *QUICK), "--kv-events-config", events(endpoint), "--max-restarts", "0"],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 1
    said = f"cannot publish cache events at tcp://127.0.0.1:{endpoint}: Address already in use"
    assert done.stderr.splitlines()[-1].startswith(f"kllm: error: the model could not be started: {said}")
    assert "Traceback" not in done.stderr
