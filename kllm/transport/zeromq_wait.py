"""ReadyToReceive: waiting on an event loop until a ZeroMQ socket has something, for whoever then receives directly.

zmq.asyncio does this too, with a future and a task's turn for every message; here a message that is there is taken at
the price of a call, and waiting costs one future.
"""

from __future__ import annotations

import asyncio

import zmq


class ReadyToReceive:
    """Of one socket, on the running loop, for one waiting task.

    ZeroMQ's descriptor becomes readable when something changes, not while messages wait, and any call on the socket may
    take that sign away. So: try to receive first, wait only after zmq.Again, and call `look` after every send.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._changed)

    async def wait(self) -> None:
        """Until there may be something, or `wake` or `close` is called."""
        if self._waiter is not None:
            raise RuntimeError("somebody already waits for this socket")
        self._waiter = self._loop.create_future()
        try:
            self.look()
            await self._waiter
        finally:
            self._waiter = None

    def look(self) -> None:
        if self._waiter is not None:
            self._changed()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Before the socket is closed."""
        self._loop.remove_reader(self._descriptor)
        self.wake()

    def _changed(self) -> None:
        # Asking for the events is what makes the descriptor quiet again.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.wake()
