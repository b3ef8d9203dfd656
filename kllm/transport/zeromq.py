"""Links over ZeroMQ: one PAIR socket at each end, msgpack inside, for one incarnation of one instance.

The gateway listens, the instance dials; neither ever reconnects: a new incarnation gets a new link. What ends a link:
the peer closes or dies (the kernel drops the connection), the network hangs (ZMTP heartbeats), a message is larger
than allowed or is not one of ours. An address carries no secret: whoever can connect first is taken for the
instance, so production uses ipc:// in a directory that only this user can enter.

An instance that was started elsewhere listens instead, for any number of gateways (kllm.transport.zeromq_peers): each
of them dials it with `dial_instance`, a DEALER socket in place of the PAIR.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kllm.messages import Down, Up, decode_down, decode_up, encode
from kllm.transport.fleet_key import FleetKey
from kllm.transport.link import Backpressure, In, LinkClosed, Out

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20  # log-probabilities of a long prompt are the largest honest message
HIGH_WATER = 4096  # messages queued by ZeroMQ in each direction before send raises Backpressure
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
REMOTE_HEARTBEAT_MS = 2_000
REMOTE_TIMEOUT_MS = 10_000  # ZeroMQ's own thread answers heartbeats: a host or a network that hangs, not a busy process
CONNECT_TIMEOUT_MS = 5_000
LINGER_MS = 1_000  # an instance's last words may take this long to leave when it closes its end

_ENDINGS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqLink(Generic[In, Out]):
    """One end; made by `listen` or `dial` inside a running loop. `address` is where the listening end can be dialled.

    Only one task may wait in recv. send raises ValueError for a message over the size limit.
    """

    def __init__(
        self,
        decode: Callable[[bytes], In],
        *,
        linger_ms: int,
        high_water: int,
        max_message_bytes: int,
        kind: int = zmq.PAIR,
        heartbeat_ms: int = HEARTBEAT_MS,
        timeout_ms: int = HEARTBEAT_TIMEOUT_MS,
    ) -> None:
        self.address = ""
        self._decode = decode
        self._max_message_bytes = max_message_bytes
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, linger_ms),
            (zmq.SNDHWM, high_water),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.RECONNECT_IVL, -1),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, timeout_ms),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._peer_gone = asyncio.get_running_loop().create_future()
        self._pending: asyncio.Future[bytes] | None = None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | _ENDINGS)
        self._watch = asyncio.create_task(self._watch_peer())

    def bind(self, address: str) -> None:
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def unlock(self, key: FleetKey) -> None:
        """As a gateway of this fleet, towards one of its instances only. Before connect."""
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, key.instance.public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.gateway.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.gateway.secret)

    def connect(self, address: str) -> None:
        self._socket.connect(address)
        self.address = address

    async def peer_gone(self) -> None:
        """Waits for the end of the connection, or of this end. What came before it can still be received."""
        await asyncio.wait((self._peer_gone,))

    def send(self, message: Out) -> None:
        if self._socket.closed or self._peer_gone.done():
            raise LinkClosed(f"the link at {self.address} is closed")
        data = encode(message)
        if len(data) > self._max_message_bytes:
            raise ValueError(f"message of {len(data)} bytes exceeds the limit of {self._max_message_bytes}")
        # Through the asyncio socket, whose bookkeeping keeps a waiting recv from missing its wake-up;
        # without blocking, so that the future comes back done.
        error = asyncio.ensure_future(self._socket.send(data, zmq.NOBLOCK)).exception()
        if isinstance(error, zmq.Again):
            raise Backpressure(f"the peer at {self.address} does not keep up")
        if error is not None:
            raise LinkClosed(f"sending to {self.address} failed: {error}") from error

    async def recv(self) -> In:
        data = await self._next_frame()
        try:
            return self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("closing the link at %s: its peer sent a malformed message: %s", self.address, error)
            self.close()
            raise LinkClosed(f"the peer at {self.address} sent a malformed message: {error}") from error

    async def _next_frame(self) -> bytes:
        if self._socket.closed:
            raise LinkClosed(f"the link at {self.address} is closed")
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._socket.recv())
        if not self._pending.done():
            # If this wait is cancelled, _pending stays and the next recv takes its message.
            await asyncio.wait((self._pending, self._peer_gone), return_when=asyncio.FIRST_COMPLETED)
        pending, self._pending = self._pending, None
        if not pending.done():
            pending.cancel()
            if self._socket.closed:
                raise LinkClosed(f"the link at {self.address} is closed")
            pending = asyncio.ensure_future(self._socket.recv(zmq.NOBLOCK))  # what came before the peer went
        if pending.cancelled() or isinstance(pending.exception(), zmq.ZMQError):
            raise LinkClosed(f"the link at {self.address} is closed")
        return pending.result()

    def close(self) -> None:
        """Also waits for what was sent to leave, at most the linger time: nothing at the gateway's end."""
        if self._socket.closed:
            return
        self._watch.cancel()
        self._end()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _end(self) -> None:
        if not self._peer_gone.done():
            self._peer_gone.set_result(None)

    async def _watch_peer(self) -> None:
        """Ends the link when the first connection ends; later ones (refused by PAIR) do not matter."""
        peer: int | None = None
        try:
            while True:
                event = parse_monitor_message(await self._monitor.recv_multipart())
                if event["event"] == zmq.EVENT_ACCEPTED:
                    peer = event["value"] if peer is None else peer
                elif event["event"] != zmq.EVENT_DISCONNECTED or peer is None or event["value"] == peer:
                    break
        except zmq.ZMQError as error:
            logger.debug("the monitor of %s ended: %s", self.address, error)
        self._end()


def listen(
    address: str, *, high_water: int = HIGH_WATER, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> ZmqLink[Up, Down]:
    """The gateway's end, bound to ipc://PATH or tcp://127.0.0.1:* . Raises OSError when it cannot bind."""
    link: ZmqLink[Up, Down] = ZmqLink(
        decode_up, linger_ms=0, high_water=high_water, max_message_bytes=max_message_bytes
    )
    return _open(link, link.bind, address)


def dial(
    address: str, *, high_water: int = HIGH_WATER, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> ZmqLink[Down, Up]:
    """The instance's end. The other end must already listen: otherwise recv raises LinkClosed soon."""
    link: ZmqLink[Down, Up] = ZmqLink(
        decode_down, linger_ms=LINGER_MS, high_water=high_water, max_message_bytes=max_message_bytes
    )
    return _open(link, link.connect, address)


def dial_instance(address: str, key: FleetKey | None = None) -> ZmqLink[Up, Down]:
    """A gateway's end towards an instance that listens. Where none does, recv raises LinkClosed, at once or after
    CONNECT_TIMEOUT_MS. Raises OSError for what is no address."""
    link: ZmqLink[Up, Down] = ZmqLink(
        decode_up,
        linger_ms=0,
        high_water=HIGH_WATER,
        max_message_bytes=MAX_MESSAGE_BYTES,
        kind=zmq.DEALER,
        heartbeat_ms=REMOTE_HEARTBEAT_MS,
        timeout_ms=REMOTE_TIMEOUT_MS,
    )
    if key is not None:
        link.unlock(key)
    return _open(link, link.connect, address)


def _open(link: ZmqLink[In, Out], attach: Callable[[str], None], address: str) -> ZmqLink[In, Out]:
    try:
        attach(address)
    except zmq.ZMQError as error:
        link.close()
        raise OSError(error.errno, f"{address}: {error.strerror}") from error
    return link
