from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.event_consumer import CacheView, EventConsumer, read_batch

from kllm.cache.block_hash import chain, root_hash
from kllm.cache.event_wire import (
    MESSAGE_ITEMS,
    EventEncoder,
    decode_events,
    open_publisher,
    salt_tag,
    short_hash,
    subscribe,
)
from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Medium
from kllm.events_config import KVEventsConfig
from kllm.transport.event_subscriber import Received

DOCS = Path(__file__).parents[2] / "docs" / "cache-events.md"

HASH = bytes(range(16))
PARENT = bytes(range(240, 256))
STORED = BlockStored([HASH], PARENT, [1, 300], 2, Medium.DEVICE)
TS = b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # 1.5

GOLDEN = [
    (
        {},
        [STORED],
        b"\x93" + TS + b"\x91\x88\xa4type\xabBlockStored"
        b"\xacblock_hashes\x91\xcf\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"
        b"\xb1parent_block_hash\xcf\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff"
        b"\xa9token_ids\x92\x01\xcd\x01\x2c\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0\x03",
    ),
    (
        {},
        [BlockRemoved([HASH], Medium.HOST), AllBlocksCleared()],
        b"\x93" + TS + b"\x92\x83\xa4type\xacBlockRemoved"
        b"\xacblock_hashes\x91\xcf\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\xa6medium\xa3CPU"
        b"\x81\xa4type\xb0AllBlocksCleared\x03",
    ),
    (
        {"format": "array"},
        [STORED, BlockRemoved([HASH], Medium.STORAGE), AllBlocksCleared()],
        b"\x93" + TS + b"\x93\x99\xabBlockStored\x91\xcf\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"
        b"\xcf\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff\x92\x01\xcd\x01\x2c\x02\xc0\xa3GPU\xc0\xc0"
        b"\x93\xacBlockRemoved\x91\xcf\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\xa7STORAGE"
        b"\x91\xb0AllBlocksCleared\x03",
    ),
    (
        {"format": "array", "hash_format": "bytes"},
        [BlockRemoved([HASH], Medium.DEVICE)],
        b"\x93" + TS + b"\x91\x93\xacBlockRemoved\x91\xc4\x10" + HASH + b"\xa3GPU\x03",
    ),
    (
        {"format": "array", "medium_names": "sglang"},  # a hash with its highest bit set: negative
        [BlockRemoved([PARENT], Medium.HOST), BlockRemoved([HASH], Medium.STORAGE)],
        b"\x93" + TS + b"\x92\x93\xacBlockRemoved\x91\xd3\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff\xaaCPU_PINNED"
        b"\x93\xacBlockRemoved\x91\xcf\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\xa4DISK\x03",
    ),
]


def encode(events: list[CacheEvent], rank: int = 3, **options: str) -> list[bytes]:
    return list(EventEncoder(KVEventsConfig.model_validate(options), rank)(1.5, events))


@pytest.mark.parametrize(("options", "events", "payload"), GOLDEN)
def test_bytes(options: dict[str, str], events: list[CacheEvent], payload: bytes) -> None:
    assert encode(events, **options) == [payload]


@pytest.mark.parametrize("form", ["tagged", "array"])
def test_adapter_and_hash_of_the_salt_are_in_extra_keys_and_the_salt_is_not(form: str) -> None:
    hashes = [HASH, PARENT]
    first = BlockStored(hashes, None, [], 2, Medium.HOST, salt="tenant-secret", adapter="sql")
    later = BlockStored(hashes, HASH, [], 2, Medium.HOST, salt="tenant-secret")
    (payload,) = encode([first, later], format=form)
    assert b"tenant-secret" not in payload
    event, follower = read_batch(payload).events
    assert event["extra_keys"] == [["sql", salt_tag("tenant-secret")], ["sql"]]
    assert event["lora_name"] == "sql"
    assert follower.get("extra_keys") is None  # isolated through its parent
    assert re.fullmatch("[0-9a-f]{32}", salt_tag("tenant-secret"))
    assert salt_tag("tenant-secret") != salt_tag("tenant-secret2")
    assert [decoded.salt for decoded in decode_events(payload) if isinstance(decoded, BlockStored)] == [
        salt_tag("tenant-secret"),
        "",
    ]


hashes_ = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4)
mediums = st.sampled_from(Medium)


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    hashes = draw(hashes_)
    block_tokens = draw(st.integers(1, 3))
    count = draw(st.sampled_from([0, len(hashes) * block_tokens]))
    return BlockStored(
        hashes,
        draw(st.none() | st.binary(min_size=16, max_size=16)),
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
        block_tokens,
        draw(mediums),
        draw(st.sampled_from(["", "salt"])),
        draw(st.sampled_from(["", "adapter"])),
    )


events_ = st.lists(
    stored_events() | st.builds(BlockRemoved, hashes_, mediums) | st.just(AllBlocksCleared()), max_size=5
)
formats = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["tagged", "array"]),
        "hash_format": st.sampled_from(["int", "bytes"]),
        "medium_names": st.sampled_from(["vllm", "sglang"]),
    }
)


def as_received(event: CacheEvent, hash_format: str) -> CacheEvent:
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = [short_hash(name) if hash_format == "int" else name for name in event.hashes]
    if isinstance(event, BlockRemoved):
        return BlockRemoved(hashes, event.medium)
    parent = event.parent if event.parent is None or hash_format == "bytes" else short_hash(event.parent)
    salt = salt_tag(event.salt) if event.salt and event.parent is None else ""
    return msgspec.structs.replace(event, hashes=hashes, parent=parent, salt=salt)


@given(events_, formats)
def test_what_is_decoded_is_what_was_encoded(events: list[CacheEvent], options: dict[str, str]) -> None:
    received = [event for payload in encode(events, **options) for event in decode_events(payload)]
    assert received == [as_received(event, options["hash_format"]) for event in events]


@given(events_, formats)
def test_a_stranger_reads_the_same(events: list[CacheEvent], options: dict[str, str]) -> None:
    batches = [read_batch(payload) for payload in encode(events, **options)]
    assert all((batch.ts, batch.rank) == (1.5, 3) for batch in batches)
    read = [event for batch in batches for event in batch.events]
    names = {"GPU": Medium.DEVICE, "CPU": Medium.HOST, "CPU_PINNED": Medium.HOST}
    for event, wire in zip(events, read, strict=True):
        assert wire["type"] == type(event).__name__
        if isinstance(event, AllBlocksCleared):
            assert len(wire) == 1
            continue
        assert [plain(name) for name in wire["block_hashes"]] == [
            plain(name) if options["hash_format"] == "bytes" else plain(name[8:]) for name in event.hashes
        ]
        assert names.get(wire["medium"], Medium.STORAGE) is event.medium
        if isinstance(event, BlockStored):
            assert (wire["token_ids"], wire["block_size"]) == (event.tokens, event.block_tokens)
            assert (wire["lora_id"], wire["lora_name"]) == (None, event.adapter or None)


def plain(name: int | bytes) -> bytes:
    return name if isinstance(name, bytes) else (name % 2**64).to_bytes(8, "big")


def test_long_runs_are_cut_so_that_no_message_is_long_to_encode() -> None:
    hashes = chain(root_hash("f"), [bytes([i % 256, i // 256]) for i in range(1000)])
    stored = BlockStored(hashes, None, list(range(16_000)), 16, Medium.DEVICE, salt="s")
    removed = BlockRemoved(hashes * 6, Medium.DEVICE)
    payloads = encode([stored, removed])
    batches = [read_batch(payload).events for payload in payloads]
    assert len(batches) > 5
    for batch in batches:
        assert sum(len(event["block_hashes"]) + len(event.get("token_ids", ())) for event in batch) <= MESSAGE_ITEMS
    pieces = [event for batch in batches for event in batch if event["type"] == "BlockStored"]
    short = [int.from_bytes(name[-8:], "big") for name in hashes]
    assert [name for piece in pieces for name in piece["block_hashes"]] == short
    assert [token for piece in pieces for token in piece["token_ids"]] == stored.tokens
    assert [piece["parent_block_hash"] for piece in pieces] == [
        None,
        *(piece["block_hashes"][-1] for piece in pieces[:-1]),
    ]
    assert [bool(piece.get("extra_keys")) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    gone = [name for batch in batches for e in batch if e["type"] == "BlockRemoved" for name in e["block_hashes"]]
    assert gone == short * 6


def decode_one(event: object) -> list[CacheEvent]:
    return decode_events(msgpack.packb([1.0, [event], 0]))


def test_events_of_other_engines_are_understood() -> None:
    block = (5).to_bytes(8, "big")
    negative = (2**64 - 1).to_bytes(8, "big")
    oldest = ["BlockStored", [5, -1], None, [1, 2], 1, None]  # before there were tiers
    assert decode_one(oldest) == [BlockStored([block, negative], None, [1, 2], 1, Medium.DEVICE)]
    assert decode_one([*oldest, "CPU_PINNED"])[0] == BlockStored([block, negative], None, [1, 2], 1, Medium.HOST)
    newest: dict[str, Any] = {"type": "BlockStored", "block_hashes": [b"x" * 32], "parent_block_hash": b"y" * 32}
    newest |= {"token_ids": [1], "block_size": 1, "lora_id": 7, "medium": "GPU", "lora_name": None, "group_idx": 0}
    newest |= {"extra_keys": [["image", ["mm-hash", 3], "s"]], "session_id": "abc", "not_invented_yet": {"a": [1]}}
    assert decode_one(newest) == [BlockStored([b"x" * 32], b"y" * 32, [1], 1, Medium.DEVICE, "s", "7")]
    assert decode_one(["BlockRemoved", [5]]) == [BlockRemoved([block], Medium.DEVICE)]
    assert decode_one(["BlockRemoved", [5], "EXTERNAL", 0, "more"]) == [BlockRemoved([block], Medium.STORAGE)]
    assert decode_events(msgpack.packb([1.0, [["AllBlocksCleared"]]])) == [AllBlocksCleared()]
    assert decode_events(msgpack.packb([1.0, [], 0, "more"])) == []


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockTouched", "block_hashes": [1]},
        ["BlockTouched"],
        ["BlockRemoved", [5], "TAPE"],
        ["BlockStored", [5], None, [], 1, None, "TAPE"],
    ],
)
def test_unknown_events_and_tiers_are_left_out(event: object) -> None:
    assert decode_events(msgpack.packb([1.0, [["AllBlocksCleared"], event], 0])) == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgpack.packb({"ts": 1.0}),
        msgpack.packb([1.0]),
        msgpack.packb(["now", []]),
        msgpack.packb([1.0, [5], 0]),
        msgpack.packb([1.0, [[]], 0]),
        msgpack.packb([1.0, [[7]], 0]),
        msgpack.packb([1.0, [{}], 0]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}], 0]),
        msgpack.packb([1.0, [["BlockRemoved", ["5"]]], 0]),
        msgpack.packb([1.0, [["BlockStored", [5], None, [], 0, None]], 0]),
        msgpack.packb([1.0, [["BlockStored", [5], None]], 0]),
        b"\x93" + TS + b"\x91" + b"\x91" * 100_000,
    ],
)
def test_malformed_payloads_are_value_errors(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decode_events(payload)


@given(st.data())
def test_damaged_payloads_are_never_worse_than_value_errors(data: st.DataObject) -> None:
    (payload,) = encode([STORED, BlockRemoved([HASH], Medium.HOST)])
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_events(bytes(damaged))
    except ValueError:
        pass


def local_config(**options: object) -> KVEventsConfig:
    """On ports that are free."""
    fields = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **options}
    return KVEventsConfig.model_validate({"enable_kv_cache_events": True, **fields})


def test_nothing_is_published_unless_it_is_switched_on() -> None:
    assert open_publisher(KVEventsConfig()) is None
    assert open_publisher(local_config(publisher="null")) is None


@pytest.mark.parametrize("form", ["tagged", "array"])
def test_a_stranger_follows_the_cache_over_the_network(form: str) -> None:
    publisher = open_publisher(local_config(format=form, topic="kv@a"), rank=2, clock=lambda: 12.5)
    assert publisher is not None
    with EventConsumer(publisher.endpoint, "kv@") as consumer:
        assert publisher.wait_for_subscribers(1, timeout=10)
        hashes = chain(root_hash("f"), [b"a", b"b", b"c"])
        publisher.publish([BlockStored(hashes, None, [1, 2, 3], 1, Medium.DEVICE)])
        publisher.publish([BlockStored(hashes[:1], None, [], 1, Medium.HOST), BlockRemoved(hashes[1:], Medium.DEVICE)])
        view = CacheView()
        for expected in range(2):
            topic, sequence, payload = consumer.receive()
            assert (topic, sequence) == (b"kv@a", expected)
            batch = read_batch(payload)
            assert (batch.ts, batch.rank) == (12.5, 2)
            for event in batch.events:
                view.apply(event)
        first = int.from_bytes(hashes[0][8:], "big")
        assert view.blocks == {"GPU": {first}, "CPU": {first}}
        assert publisher.replay_endpoint is not None
        replayed = consumer.replay(publisher.replay_endpoint, 1)
        assert replayed == [(topic, sequence, payload)]
    publisher.close()


@pytest.mark.parametrize("form", ["tagged", "array"])
def test_our_own_subscriber_follows_the_cache(form: str) -> None:
    async def main() -> None:
        publisher = open_publisher(local_config(format=form, hash_format="bytes"))
        assert publisher is not None
        source = subscribe(publisher.endpoint, publisher.replay_endpoint)
        publisher.publish([STORED])
        publisher.publish([BlockRemoved([HASH], Medium.HOST), AllBlocksCleared()])
        assert await anext(source) == Received(0, [STORED])
        assert await anext(source) == Received(1, [BlockRemoved([HASH], Medium.HOST), AllBlocksCleared()])
        source.close()
        publisher.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def documented(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if containing in block]
    return block


def test_the_consumer_of_the_documentation_works() -> None:
    publisher = open_publisher(local_config())
    assert publisher is not None
    assert publisher.replay_endpoint is not None
    with EventConsumer(publisher.endpoint) as early:
        assert publisher.wait_for_subscribers(1, timeout=10)
        publisher.publish([BlockStored([HASH], None, [1], 1, Medium.DEVICE)])
        early.receive()  # so the consumer below has missed it
        command = [sys.executable, "-c", documented("python", "import msgpack")]
        arguments = [publisher.endpoint, publisher.replay_endpoint]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as consumer:
            too_late = threading.Timer(30, consumer.kill)
            too_late.start()
            assert publisher.wait_for_subscribers(2, timeout=20)
            publisher.publish([BlockRemoved([HASH], Medium.DEVICE)])
            assert consumer.stdout is not None
            lines = [consumer.stdout.readline().split() for _ in range(2)]
            too_late.cancel()
            consumer.kill()
    publisher.close()
    number = str(int.from_bytes(HASH[8:], "big"))
    assert lines == [
        ["0", "BlockStored", f"[{number}]", "GPU"],
        ["1", "BlockRemoved", f"[{number}]", "GPU"],
    ]


def test_the_hash_of_the_documentation_is_ours() -> None:
    namespace = {"fingerprint": "f", "salt": "s", "adapter": "", "blocks": [b"ab", b"cd"]}
    script = (
        "import sys, json\nfingerprint, salt, adapter, *blocks = sys.argv[1:]\nblocks = [b.encode() for b in blocks]\n"
    )
    script += documented("python", "import hashlib") + "\nprint(' '.join(name.hex() for name in names))"
    arguments = [namespace["fingerprint"], namespace["salt"], namespace["adapter"], "ab", "cd"]
    printed = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, check=True)
    assert printed.stdout.decode().split() == [name.hex() for name in chain(root_hash("f", "s"), [b"ab", b"cd"])]
