"""Follows one publisher of events (event_publisher.py, or any that speaks vLLM's protocol) and mends gaps by replay.

Nothing on the wire names a publisher's incarnation, so continuity is proven: a replay starts at the last batch that was
delivered, and if the publisher has another batch under that number, or none any more, it is not the one it was. That is
asked at every connect, at every gap, and when nothing came for a while (the last batches could be lost unnoticed).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kllm.transport.event_publisher import END

logger = logging.getLogger(__name__)

Event = TypeVar("Event")

MAX_MESSAGE_BYTES = 64 * 2**20
HIGH_WATER = 100_000  # batches that wait here to be read before ZeroMQ drops some
REPLAY_TIMEOUT_S = 5.0
QUIET_S = 10.0
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000


class Received(NamedTuple, Generic[Event]):
    sequence: int
    events: list[Event]


class Lost(NamedTuple):
    """These batches, first to last, will not come: what is known of the publisher's cache may be wrong now."""

    first: int
    last: int


class Restarted(NamedTuple):
    """The publisher is another one than before: what was known of its cache is void. Its sequence starts at 0."""


class SubscriberCounts(msgspec.Struct):
    received: int = 0
    lost: int = 0  # batches, the malformed included
    malformed: int = 0  # messages and payloads
    replays: int = 0
    replay_timeouts: int = 0
    restarts: int = 0


class _Message(NamedTuple):
    sequence: int
    payload: bytes


class EventSubscriber(Generic[Event]):
    """An endless async iterator of Received, Lost and Restarted, in the order of sequence numbers from 0.

    Make it inside a running loop. One task reads; a read that is cancelled (or timed out) loses nothing. Without a
    replay endpoint every gap is Lost, and a restart is noticed only by numbers that go back.
    decode: payload to events; raises ValueError for what is malformed. topic: a prefix of the publisher's.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        decode: Callable[[bytes], list[Event]],
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.counts = SubscriberCounts()
        self._decode = decode
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._quiet_s = quiet_s
        self._ready: deque[Received[Event] | Lost | Restarted] = deque()
        self._next = 0  # the sequence number to deliver
        self._previous = b""  # payload of number _next - 1
        self._newest_live = -1
        self._held: _Message | None = None  # came after a gap that a replay should fill first
        self._replay_due = False
        self._pending: dict[zmq.asyncio.Socket, asyncio.Future[list[bytes]]] = {}
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._open(zmq.SUB)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        try:
            self._connect(self._socket, endpoint)
        except OSError:
            self.close()
            raise

    def __aiter__(self) -> AsyncIterator[Received[Event] | Lost | Restarted]:
        return self

    async def __anext__(self) -> Received[Event] | Lost | Restarted:
        while not self._ready:
            if self._socket.closed:
                raise StopAsyncIteration
            if self._replay_due:
                await self._recover()
            elif (message := await self._next_live()) is not None:
                self._take(message)
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the iteration; idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.destroy(linger=0)

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        opened = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            opened.setsockopt(option, value)
        return opened

    def _connect(self, opened: zmq.asyncio.Socket, endpoint: str) -> None:
        if "[" in endpoint:
            opened.setsockopt(zmq.IPV6, 1)
        try:
            opened.connect(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot subscribe to {endpoint}: {zmq.strerror(error.errno or 0)}") from error

    async def _next_live(self) -> _Message | None:
        """None: ask for a replay (if that is possible), or it was no message."""
        for source in (self._monitor, self._socket):
            if source not in self._pending:
                self._pending[source] = asyncio.ensure_future(source.recv_multipart())
        quiet = self._quiet_s if self._replay_endpoint is not None else None
        # A cancelled wait leaves the futures for the next one.
        await asyncio.wait(self._pending.values(), timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
        if self._socket.closed:
            return None
        connected = self._take_done(self._monitor) is not None
        live = None if connected else self._take_done(self._socket)
        if live is None:
            self._replay_due = self._replay_endpoint is not None
            return None
        message = _parse(live)
        if message is None:
            self.counts.malformed += 1
        return message

    def _take_done(self, source: zmq.asyncio.Socket) -> list[bytes] | None:
        return self._pending.pop(source).result() if self._pending[source].done() else None

    def _take(self, message: _Message) -> None:
        if message.sequence <= self._newest_live:
            self._restart()
        self._newest_live = message.sequence
        if message.sequence > self._next and self._replay_endpoint is not None:
            self._held = message
            self._replay_due = True
        else:
            self._advance(message)

    def _advance(self, message: _Message) -> None:
        """Deliver it, unless a replay did; what is missing before it is lost."""
        if message.sequence < self._next:
            return
        if message.sequence > self._next:
            self._lose(self._next, message.sequence - 1)
        self._next, self._previous = message.sequence + 1, message.payload
        try:
            events = self._decode(message.payload)
        except ValueError as error:
            logger.warning("batch %d of events is malformed: %s", message.sequence, error)
            self.counts.malformed += 1
            self._lose(message.sequence, message.sequence)
        else:
            self.counts.received += 1
            self._ready.append(Received(message.sequence, events))

    def _lose(self, first: int, last: int) -> None:
        self.counts.lost += last - first + 1
        self._ready.append(Lost(first, last))

    def _restart(self) -> None:
        self.counts.restarts += 1
        self._ready.append(Restarted())
        self._next, self._previous, self._newest_live = 0, b"", -1

    async def _recover(self) -> None:
        """Replay from the last batch that was delivered, or from 0 if it is not the same publisher any more."""
        try:
            if not await self._replay():
                self._restart()
                await self._replay()
        except TimeoutError:
            if self._socket.closed:
                return
            logger.warning("%s does not answer a request for replay", self._replay_endpoint)
            self.counts.replay_timeouts += 1
        self._replay_due = False
        held, self._held = self._held, None
        if held is not None:
            self._newest_live = max(self._newest_live, held.sequence)
            self._advance(held)

    async def _replay(self) -> bool:
        """False: the publisher is another one. Raises TimeoutError."""
        assert self._replay_endpoint is not None
        self.counts.replays += 1
        proven = self._next == 0
        requester = self._open(zmq.DEALER)  # of its own: no replies to an earlier request
        try:
            self._connect(requester, self._replay_endpoint)
            await requester.send_multipart((b"", max(0, self._next - 1).to_bytes(8, "big")))
            while True:
                message = _parse((await self._reply(requester))[1:])
                if message is None:
                    self.counts.malformed += 1
                elif message.sequence == _END:
                    return proven
                elif not proven and message.sequence < self._next and message.payload != self._previous:
                    return False
                else:
                    proven = True
                    self._advance(message)
        finally:
            requester.close()

    async def _reply(self, requester: zmq.asyncio.Socket) -> list[bytes]:
        reply = asyncio.ensure_future(requester.recv_multipart())
        await asyncio.wait((reply,), timeout=self._replay_timeout_s)
        if not reply.done() or reply.cancelled():  # cancelled by close()
            raise TimeoutError
        return reply.result()


_END = int.from_bytes(END, "big")


def _parse(frames: Sequence[bytes]) -> _Message | None:
    """([topic,] sequence, payload): publishers of old leave the topic out of replies."""
    if len(frames) not in (2, 3) or len(frames[-2]) != 8:
        return None
    return _Message(int.from_bytes(frames[-2], "big"), frames[-1])
