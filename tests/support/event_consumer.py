"""A consumer of cache events as a stranger would write it: msgpack and ZeroMQ, and nothing of kLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import zmq

POSITIONS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class Batch(NamedTuple):
    ts: float
    events: list[dict[str, Any]]  # each with "type" and the fields that were there
    rank: int


def read_batch(payload: bytes) -> Batch:
    ts, events, rank = msgpack.unpackb(payload)
    return Batch(ts, [event if isinstance(event, dict) else _named(event) for event in events], rank)


def _named(event: list[Any]) -> dict[str, Any]:
    tag, *values = event
    return {"type": tag, **dict(zip(POSITIONS[tag], values, strict=True))}


class EventConsumer:
    """Subscribes at once. receive: blocks until a message is there, (topic, sequence, payload)."""

    def __init__(self, endpoint: str, topic: str = "", timeout_s: float = 10.0, **options: int) -> None:
        self._context = zmq.Context()
        self._timeout_ms = int(timeout_s * 1000)
        self._socket = self._open(zmq.SUB)
        for name, value in options.items():
            setattr(self._socket, name, value)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic.encode())

    def receive(self) -> tuple[bytes, int, bytes]:
        topic, sequence, payload = self._socket.recv_multipart()
        assert len(sequence) == 8
        return topic, int.from_bytes(sequence, "big"), payload

    def waiting(self) -> list[int]:
        """Sequence numbers of what arrives until nothing does for a fifth of a second."""
        sequences = []
        while self._socket.poll(200):
            sequences.append(self.receive()[1])
        return sequences

    def replay(self, endpoint: str, first: int, *before: list[bytes]) -> list[tuple[bytes, int, bytes]]:
        """What the publisher still has from `first`. before: other requests sent first, on the same connection."""
        requester = self._open(zmq.DEALER)
        requester.connect(endpoint)
        for request in before:
            requester.send_multipart(request)
        requester.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            empty, topic, sequence, payload = requester.recv_multipart()
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                requester.close()
                return batches
            batches.append((topic, int.from_bytes(sequence, "big"), payload))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> EventConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.rcvtimeo = self._timeout_ms
        return opened


class CacheView:
    """What a cache holds, as far as its events say: {medium: hashes}."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int | bytes]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockStored":
            self.blocks.setdefault(event["medium"], set()).update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            self.blocks.setdefault(event["medium"], set()).difference_update(event["block_hashes"])
