"""Publishes batches of events to whoever subscribes, and again to who missed some. ZeroMQ, vLLM's protocol:

    PUB     (topic, sequence, payload)                           sequence: 8 bytes, big-endian, from 0
    ROUTER  request  (empty, first sequence)
            replies  (empty, topic, sequence, payload) for every batch from there that is still in the buffer,
                     then (empty, empty, -1, empty)

A sender thread owns the sockets, encodes, and numbers. publish() only puts a batch into a bounded queue: if the sender
falls behind, the oldest batches are given up, and their sequence numbers are skipped so that consumers notice.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

import msgspec
import zmq

from kllm.events_config import KVEventsConfig, endpoint_for, replay_endpoint_for

logger = logging.getLogger(__name__)

Event = TypeVar("Event")
Encode = Callable[[float, Sequence[Event]], Iterable[bytes]]  # time, events -> payloads, one sequence number each

END = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 1_000  # what was sent may take this long to leave after close
CLOSE_S = 1.0  # what is queued may take this long to be sent
MAX_REQUEST_BYTES = 4096  # subscriptions and replay requests; who sends more is disconnected
BATCHES_PER_TURN = 64  # sent, or replayed, before the sender looks after everything else again
REPLAYS_AT_ONCE = 16  # further requests wait in their queue


class PublisherCounts(msgspec.Struct):
    """Since the start; reported as metrics."""

    sent: int = 0  # messages, whether or not anybody is subscribed
    dropped: int = 0  # batches that were given up: the queue was full, or publisher closed
    failed: int = 0  # batches that could not be encoded
    replays: int = 0
    malformed: int = 0  # replay requests that were ignored
    subscribers: int = 0  # now


class EventPublisher(Generic[Event]):
    """One publisher, with a sequence from 0. Constructing it binds; OSError says what could not be bound.

    rank: data-parallel rank; the ports are the config's plus rank. clock: seconds since the epoch, stamped on batches
    when they are published.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        encode: Encode[Event],
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counts = PublisherCounts()
        self._encode = encode
        self._clock = clock
        self._topic = config.topic.encode()
        self._limit = config.max_queue_size
        self._lock = threading.Lock()  # of what follows, up to the empty line; never held for longer than a few lines
        self._queue: deque[tuple[float, Sequence[Event]]] = deque()
        self._skipped = 0  # batches given up since the sender last took one: all of them are older than the queue
        self._signalled = False
        self._closing = False

        self._subscribed = threading.Condition()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._replays: deque[tuple[bytes, Iterator[tuple[int, bytes]]]] = deque()  # client, what it still gets
        self._context = zmq.Context(io_threads=1)
        # XPUB is PUB that also says who subscribes.
        self._pub = self._context.socket(zmq.XPUB)
        self._replay: zmq.Socket[bytes] | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        try:
            self.endpoint = self._bind_pub(endpoint_for(config, rank), config.hwm)
            replay = replay_endpoint_for(config, rank)
            self.replay_endpoint = None if replay is None else self._bind_replay(replay, config.buffer_steps)
        except BaseException:
            self._close_sockets(linger_ms=0)
            raise
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()
        logger.info("cache events at %s, replay at %s", self.endpoint, self.replay_endpoint or "no endpoint")

    def publish(self, events: Sequence[Event]) -> None:
        """Returns at once; from any thread. The events must not change any more. After close() they are dropped."""
        if not events:
            return
        batch = (self._clock(), events)
        with self._lock:
            if self._closing:
                self.counts.dropped += 1
                return
            if len(self._queue) >= self._limit:
                self._queue.popleft()
                self._skipped += 1
                self.counts.dropped += 1
            self._queue.append(batch)
            if not self._signalled:
                self._signalled = True
                self._wake_writer.send(b"\0")

    def wait_for_subscribers(self, count: int, timeout: float) -> bool:
        """Until so many are subscribed. False: not within `timeout` seconds."""
        with self._subscribed:
            return self._subscribed.wait_for(lambda: self.counts.subscribers >= count, timeout)

    def close(self) -> None:
        """Waits until what was published has left, at most about CLOSE_S + LINGER_MS; idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake_writer.send(b"\0")
        self._thread.join()

    def _bind_pub(self, endpoint: str, hwm: int) -> str:
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.setsockopt(zmq.SNDHWM, hwm)
        return _bind(self._pub, endpoint)

    def _bind_replay(self, endpoint: str, buffer_steps: int) -> str:
        self._replay = self._context.socket(zmq.ROUTER)
        # ROUTER drops what does not fit into a client's queue. Twice: the queue learns of what was read in halves.
        self._replay.setsockopt(zmq.SNDHWM, 2 * (buffer_steps + 1))
        return _bind(self._replay, endpoint)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_reader, self._pub, self._replay):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        queued = False
        try:
            while not self._closing:
                ready = dict(poller.poll(0 if queued or self._replays else None))
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(64)
                if self._pub in ready:
                    self._read_subscriptions()
                if self._replay in ready and len(self._replays) < REPLAYS_AT_ONCE:
                    self._begin_replay()
                if self._replays:
                    self._go_on_replaying()
                queued = self._send_queued(BATCHES_PER_TURN)
            deadline = time.monotonic() + CLOSE_S
            while self._send_queued(BATCHES_PER_TURN) and time.monotonic() < deadline:
                pass
            self.counts.dropped += len(self._queue)
        except Exception:
            logger.exception("publishing of cache events at %s ended", self.endpoint)
        finally:
            with self._lock:
                self._closing = True
            self._close_sockets(LINGER_MS)

    def _send_queued(self, most: int) -> bool:
        """Whether there is more."""
        for _ in range(most):
            with self._lock:
                if not self._queue:
                    self._signalled = False
                    return False
                ts, events = self._queue.popleft()
                skipped, self._skipped = self._skipped, 0
            self._sequence += skipped
            try:
                for payload in self._encode(ts, events):
                    self._send(payload)
            except Exception:  # one bad batch must not end the stream
                logger.exception("a batch of cache events could not be encoded")
                self.counts.failed += 1
                self._sequence += 1
        return True

    def _send(self, payload: bytes) -> None:
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._buffer.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        self.counts.sent += 1

    def _read_subscriptions(self) -> None:
        changes = 0
        while self._pub.poll(0, zmq.POLLIN):
            frame = self._pub.recv()
            changes += 1 if frame[:1] == b"\1" else -1 if frame[:1] == b"\0" else 0
        with self._subscribed:
            self.counts.subscribers = max(0, self.counts.subscribers + changes)
            self._subscribed.notify_all()

    def _begin_replay(self) -> None:
        assert self._replay is not None
        identity, *request = self._replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            self.counts.malformed += 1
            return
        self.counts.replays += 1
        first = int.from_bytes(request[1], "big")
        self._replays.append((identity, iter([batch for batch in self._buffer if batch[0] >= first])))

    def _go_on_replaying(self) -> None:
        """A part of one replay; the others have their turns too."""
        assert self._replay is not None
        identity, batches = self._replays.popleft()
        sent = 0
        for sequence, payload in islice(batches, BATCHES_PER_TURN):
            self._replay.send_multipart((identity, b"", self._topic, sequence.to_bytes(8, "big"), payload))
            sent += 1
        if sent == BATCHES_PER_TURN:
            self._replays.append((identity, batches))
        else:
            self._replay.send_multipart((identity, b"", b"", END, b""))

    def _close_sockets(self, linger_ms: int) -> None:
        self._pub.close(linger_ms)
        if self._replay is not None:
            self._replay.close(linger_ms)
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()


def _bind(bound: zmq.Socket[bytes], endpoint: str) -> str:
    bound.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    if "[" in endpoint:
        bound.setsockopt(zmq.IPV6, 1)
    try:
        bound.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            error.errno,
            f"cannot publish cache events at {endpoint}: {error.strerror or zmq.strerror(error.errno or 0)}",
        ) from error
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
