"""Server-sent events, whatever the network does to their borders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kllm.cluster.external.event_stream import EventTooLarge, sse_events

STREAM = b'data: {"a": 1}\n\n: a comment\n\ndata: two\ndata: lines\n\nevent: x\ndata:close\n\ndata: cut off'
EVENTS = [b'{"a": 1}', b"two\nlines", b"close"]


def read(chunks: list[bytes], max_bytes: int = 1000) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def main() -> list[bytes]:
        return [event async for event in sse_events(source(), max_bytes)]

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["lf", "crlf"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_borders_do_not_matter(stream: bytes, size: int) -> None:
    assert read([stream[start : start + size] for start in range(0, len(stream), size)]) == EVENTS


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(EventTooLarge, match="1,000"):
        read([b"data: " + b"x" * 100] * 11)


def test_a_long_event_in_one_chunk_is_refused() -> None:
    with pytest.raises(EventTooLarge):
        read([b"data: " + b"x" * 2000 + b"\n\n"])
