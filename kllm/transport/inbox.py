"""Inbox: what has arrived at one end of a link within this process, and the reader that waits for it."""

from __future__ import annotations

import asyncio
from collections import deque

from kllm.messages import Message
from kllm.transport.link import LinkClosed


class Inbox:
    """For one reader. end(): nothing more will come, as far as this end knows. close(): nobody reads any more."""

    def __init__(self) -> None:
        self.closed = False
        self.ended = False
        self._messages: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Dropped if nobody reads any more."""
        if not self.closed:
            self._messages.append(message)
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._messages.clear()
        self._wake()

    async def get(self) -> Message:
        """The next message. Raises LinkClosed when this end was closed, or the other and nothing is left."""
        if self._waiter is not None:
            raise RuntimeError("recv is already waiting on this link")
        while not self.closed and not self._messages:
            if self.ended:
                raise LinkClosed("the peer closed the link")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.closed:
            raise LinkClosed("the link is closed")
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
