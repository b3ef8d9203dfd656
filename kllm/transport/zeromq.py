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
from zmq.utils.monitor import parse_monitor_message

from kllm.messages import Down, Up, decode_down, decode_up, encode
from kllm.transport.fleet_key import FleetKey
from kllm.transport.link import Backpressure, In, LinkClosed, Out
from kllm.transport.zeromq_wait import ReadyToReceive

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20  # log-probabilities of a long prompt are the largest honest message
HIGH_WATER = 4096  # messages queued by ZeroMQ in each direction before send raises Backpressure
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
REMOTE_HEARTBEAT_MS = 2_000
REMOTE_TIMEOUT_MS = 10_000  # ZeroMQ's own thread answers heartbeats: a host or a network that hangs, not a busy process
CONNECT_TIMEOUT_MS = 5_000
NEVER_MS = 10 * 24 * 3600 * 1000
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
        reconnect_ms: int = -1,
    ) -> None:
        self.address = ""
        self._decode = decode
        self._max_message_bytes = max_message_bytes
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, linger_ms),
            (zmq.SNDHWM, high_water),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.RECONNECT_IVL, reconnect_ms),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, timeout_ms),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._peer_gone = asyncio.get_running_loop().create_future()
        self._ready = ReadyToReceive(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | _ENDINGS)
        self._monitor_ready = ReadyToReceive(self._monitor)
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
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
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
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise Backpressure(f"the peer at {self.address} does not keep up") from None
        except zmq.ZMQError as error:
            raise LinkClosed(f"sending to {self.address} failed: {error}") from error
        finally:
            self._ready.look()

    async def recv(self) -> In:
        data = await self._next_frame()
        try:
            return self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("closing the link at %s: its peer sent a malformed message: %s", self.address, error)
            self.close()
            raise LinkClosed(f"the peer at {self.address} sent a malformed message: {error}") from error

    async def _next_frame(self) -> bytes:
        while not self._socket.closed:
            gone = self._peer_gone.done()  # what came before the peer went is still received
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if gone:
                    break
                await self._ready.wait()
            except zmq.ZMQError:
                break
        raise LinkClosed(f"the link at {self.address} is closed")

    def close(self) -> None:
        """Also waits for what was sent to leave, at most the linger time: nothing at the gateway's end."""
        if self._socket.closed:
            return
        self._watch.cancel()
        self._ready.close()
        self._monitor_ready.close()
        self._end()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _end(self) -> None:
        if not self._peer_gone.done():
            self._peer_gone.set_result(None)
            self._ready.wake()

    async def _watch_peer(self) -> None:
        """Ends the link when the first connection ends; later ones (refused by PAIR) do not matter."""
        peer: int | None = None
        try:
            while True:
                event = parse_monitor_message(await self._next_event())
                if event["event"] == zmq.EVENT_ACCEPTED:
                    peer = event["value"] if peer is None else peer
                elif event["event"] != zmq.EVENT_DISCONNECTED or peer is None or event["value"] == peer:
                    break
        except zmq.ZMQError as error:
            logger.debug("the monitor of %s ended: %s", self.address, error)
        self._end()

    async def _next_event(self) -> list[bytes]:
        while True:
            try:
                return self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await self._monitor_ready.wait()


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
        reconnect_ms=NEVER_MS,  # with -1, ZeroMQ throws away what came before the connection ended and was not read yet
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
