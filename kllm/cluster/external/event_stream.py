"""Server-sent events as they come over the network."""

from __future__ import annotations

from collections.abc import AsyncIterator


class EventTooLarge(ValueError):
    """An event is longer than allowed; the stream cannot be read on."""


async def sse_events(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The `data:` of every event, its lines joined, whatever the borders of the chunks. What the end of the stream
    cuts off is left out. max_bytes: of one event. Raises EventTooLarge."""
    pending = b""
    async for chunk in chunks:
        pending += chunk
        if b"\r" in pending:
            pending = pending.replace(b"\r\n", b"\n")
        *events, pending = pending.split(b"\n\n")
        if len(pending) > max_bytes or any(len(event) > max_bytes for event in events):
            raise EventTooLarge(f"an event has more than {max_bytes:,} bytes")
        for event in events:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
