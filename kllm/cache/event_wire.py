"""Cache events on the wire: vLLM's batches, with events as tagged maps or (older) as positional arrays.

    batch            [ts, [event, ...], data_parallel_rank]
    tagged event     {"type": "BlockStored", "block_hashes": [...], ...}      fields that have a default may be left out
    positional       ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, ...]

docs/cache-events.md says what each field holds. The stream carries the tokens of prompts; of salts only a hash.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from kllm.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Medium
from kllm.events_config import KVEventsConfig
from kllm.transport.event_publisher import EventPublisher
from kllm.transport.event_subscriber import EventSubscriber

# Tokens and hashes of one message: encoding it holds the interpreter's lock, and the step thread waits for that.
MESSAGE_ITEMS = 3072

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
REMOVED = ("block_hashes", "medium")

_UINT64 = 2**64 - 1
_MEDIUM_NAMES = {
    "vllm": {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.STORAGE: "STORAGE"},
    "sglang": {Medium.DEVICE: "GPU", Medium.HOST: "CPU_PINNED", Medium.STORAGE: "DISK"},
}
_MEDIUMS = {
    None: Medium.DEVICE,  # events older than tiers
    "GPU": Medium.DEVICE,
    "CPU": Medium.HOST,
    "CPU_PINNED": Medium.HOST,
    "STORAGE": Medium.STORAGE,
    "DISK": Medium.STORAGE,
    "EXTERNAL": Medium.STORAGE,
}


def salt_tag(salt: str) -> str:
    """What events say instead of the salt: equal for equal salts, and no way back from it. 32 hexadecimal digits."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"kllm-salt").hexdigest()


def short_hash(block_hash: bytes) -> bytes:
    """What is left of a block's hash where the wire has 64 bits: its last 8 bytes (read big-endian), as in vLLM."""
    return block_hash[-8:]


class EventEncoder:
    """Batches of events to payloads, as the config says. Long batches become several payloads, in order; a long run of
    blocks is cut into consecutive runs, each with the hash before it as parent."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        self._rank = rank
        self._tagged = config.format == "tagged"
        self._mediums = _MEDIUM_NAMES[config.medium_names]
        self._hash: Callable[[bytes], int | bytes] = bytes
        if config.hash_format == "int":
            self._hash = partial(_integer, signed=config.medium_names == "sglang")
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, ts: float, events: Iterable[CacheEvent]) -> Iterator[bytes]:
        """ts: seconds since the epoch."""
        batch: list[object] = []
        items = 0
        for event in events:
            for piece, size in _pieces(event):
                if batch and items + size > MESSAGE_ITEMS:
                    yield self._encoder.encode((ts, batch, self._rank))
                    batch, items = [], 0
                batch.append(self._wire(piece))
                items += size
        if batch:
            yield self._encoder.encode((ts, batch, self._rank))

    def _wire(self, event: CacheEvent) -> object:
        if isinstance(event, BlockStored):
            return self._shape("BlockStored", STORED, self._stored(event))
        if isinstance(event, BlockRemoved):
            hashes = [self._hash(block_hash) for block_hash in event.hashes]
            return self._shape("BlockRemoved", REMOVED, [hashes, self._mediums[event.medium]])
        return self._shape("AllBlocksCleared", (), [])

    def _stored(self, event: BlockStored) -> list[object]:
        return [
            [self._hash(block_hash) for block_hash in event.hashes],
            None if event.parent is None else self._hash(event.parent),
            event.tokens if isinstance(event.tokens, list) else list(event.tokens),
            event.block_tokens,
            None,  # lora_id: adapters have names
            self._mediums[event.medium],
            event.adapter or None,
            _extra_keys(event),
        ]

    def _shape(self, tag: str, names: Sequence[str], values: list[object]) -> object:
        if not self._tagged:
            return [tag, *values]
        fields = dict(zip(names, values, strict=True))
        if fields.get("extra_keys", ()) is None:
            del fields["extra_keys"]  # the only field of these with a default in vLLM
        return {"type": tag, **fields}


def _integer(block_hash: bytes, signed: bool) -> int:
    return int.from_bytes(block_hash[-8:], "big", signed=signed)


def _extra_keys(event: BlockStored) -> list[list[str] | None] | None:
    """What beside tokens the blocks depend on, per block: the adapter, and for the first of a prefix the salt (those
    that follow have it through their parent), as vLLM has it, but never the salt itself."""
    adapter = [event.adapter] if event.adapter else []
    salt = [salt_tag(event.salt)] if event.salt and event.parent is None else []
    if not adapter and not salt:
        return None
    first: list[str] | None = adapter + salt
    return [first] + [adapter or None] * (len(event.hashes) - 1)


def _pieces(event: CacheEvent) -> Iterator[tuple[CacheEvent, int]]:
    """The event in consecutive pieces of at most MESSAGE_ITEMS tokens and hashes (or one block), and their sizes."""
    if isinstance(event, AllBlocksCleared):
        yield event, 1
        return
    per_block = 1 + (event.block_tokens if isinstance(event, BlockStored) and event.tokens else 0)
    step = max(1, MESSAGE_ITEMS // per_block)
    if len(event.hashes) <= step:
        yield event, len(event.hashes) * per_block
        return
    for start in range(0, len(event.hashes), step):
        hashes = event.hashes[start : start + step]
        size = len(hashes) * per_block
        if isinstance(event, BlockRemoved):
            yield BlockRemoved(hashes, event.medium), size
            continue
        tokens = event.tokens[start * event.block_tokens : (start + step) * event.block_tokens]
        parent = event.hashes[start - 1] if start else event.parent
        yield BlockStored(hashes, parent, tokens, event.block_tokens, event.medium, event.salt, event.adapter), size


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None


_batch_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_events(payload: bytes) -> list[CacheEvent]:
    """The events of one payload, in either format and from any engine that speaks it.

    Integer hashes, signed or not, become their 8 bytes (`short_hash`); salts are what the sender put in their place.
    Types of events, tiers and fields that are not known are left out. Raises ValueError for anything malformed.
    """
    try:
        raws = _batch_decoder.decode(payload).events
        decoded = [_event(msgspec.msgpack.decode(raw)) for raw in raws]
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return [event for event in decoded if event is not None]


def _event(value: object) -> CacheEvent | None:
    if isinstance(value, dict):
        tag, fields = value.get("type"), value
    elif isinstance(value, list) and value:
        tag = value[0]
        names = STORED if tag == "BlockStored" else REMOVED
        fields = dict(zip(names, value[1:], strict=False))
    else:
        raise ValueError("an event is neither a map nor an array with its type first")
    if not isinstance(tag, str):
        raise ValueError("an event has no type")
    if tag == "BlockStored":
        return _stored_event(msgspec.convert(fields, _Stored))
    if tag == "BlockRemoved":
        removed = msgspec.convert(fields, _Removed)
        medium = _MEDIUMS.get(removed.medium)
        return None if medium is None else BlockRemoved([_bytes(name) for name in removed.block_hashes], medium)
    return AllBlocksCleared() if tag == "AllBlocksCleared" else None


def _stored_event(stored: _Stored) -> BlockStored | None:
    medium = _MEDIUMS.get(stored.medium)
    if medium is None:
        return None
    if stored.block_size < 1:
        raise ValueError(f"block_size is {stored.block_size}")
    adapter = stored.lora_name or ("" if stored.lora_id is None else str(stored.lora_id))
    first = stored.extra_keys[0] if stored.extra_keys else None
    keys = [key for key in first if isinstance(key, str) and key != adapter] if isinstance(first, list) else []
    return BlockStored(
        hashes=[_bytes(name) for name in stored.block_hashes],
        parent=None if stored.parent_block_hash is None else _bytes(stored.parent_block_hash),
        tokens=stored.token_ids,
        block_tokens=stored.block_size,
        medium=medium,
        salt=keys[-1] if keys else "",
        adapter=adapter,
    )


def _bytes(name: int | bytes) -> bytes:
    return name if isinstance(name, bytes) else (name & _UINT64).to_bytes(8, "big")


def open_publisher(
    config: KVEventsConfig, rank: int = 0, clock: Callable[[], float] = time.time
) -> EventPublisher[CacheEvent] | None:
    """Publishes from now on, at the config's ports plus `rank`; None where the config publishes nothing.

    Raises OSError when it cannot bind, ValueError when there is no such port.
    """
    return EventPublisher(config, EventEncoder(config, rank), rank=rank, clock=clock) if config.on else None


def subscribe(endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> EventSubscriber[CacheEvent]:
    """Call it inside a running loop, and close() what it returns. Raises OSError for a bad endpoint."""
    return EventSubscriber(endpoint, replay_endpoint, topic, decode=decode_events)
