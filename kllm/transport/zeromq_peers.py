"""Peers over ZeroMQ: a ROUTER socket that gateways dial with `dial_instance` (kllm.transport.zeromq).

That a gateway's connection has ended shows when something is sent to it, which reports do every second. With a key
(kllm.transport.fleet_key) everything is encrypted, and only who has the same key file gets in.
"""

from __future__ import annotations

import asyncio
import errno
import logging

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from kllm.messages import Down, Up, decode_down, encode
from kllm.transport.fleet_key import FleetKey
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.peers import PeerKey
from kllm.transport.zeromq import HIGH_WATER, LINGER_MS, MAX_MESSAGE_BYTES, REMOTE_HEARTBEAT_MS, REMOTE_TIMEOUT_MS

logger = logging.getLogger(__name__)

BACKLOG = 128
DOMAIN = "kllm"


class ZmqPeers:
    """Made inside a running loop. address: as it can be dialled on this machine. Raises OSError if it cannot bind."""

    def __init__(
        self,
        address: str,
        key: FleetKey | None = None,
        *,
        high_water: int = HIGH_WATER,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._max_message_bytes = max_message_bytes
        self._context = zmq.asyncio.Context(io_threads=1)
        self._guard: AsyncioAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, high_water),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.BACKLOG, BACKLOG),
            (zmq.IPV6, int("[" in address)),
            (zmq.HEARTBEAT_IVL, REMOTE_HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, REMOTE_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)
        try:
            if key is not None:
                self._lock(key)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"{address}: {error.strerror}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _lock(self, key: FleetKey) -> None:
        self._guard = AsyncioAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(DOMAIN, _OnlyThis(key.gateway.public))
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.instance.secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.instance.public)

    def send(self, peer: PeerKey, message: Up) -> None:
        if self._socket.closed:
            raise LinkClosed(f"{self.address} is closed")
        data = encode(message)
        if len(data) > self._max_message_bytes:
            raise ValueError(f"message of {len(data)} bytes exceeds the limit of {self._max_message_bytes}")
        # As in ZmqLink.send: through the asyncio socket, without blocking, so that the future comes back done.
        error = asyncio.ensure_future(self._socket.send_multipart((peer, data), zmq.NOBLOCK)).exception()
        if isinstance(error, zmq.Again):
            raise Backpressure("the gateway does not keep up")
        if error is not None:
            gone = getattr(error, "errno", None) == errno.EHOSTUNREACH
            raise LinkClosed("the gateway's connection has ended" if gone else f"sending failed: {error}") from error

    async def recv(self) -> tuple[PeerKey, Down]:
        """Frames that are no message are ignored: nobody who speaks the protocol sends any."""
        while not self._socket.closed:
            try:
                peer, *frames = await self._socket.recv_multipart()
            except (zmq.ZMQError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and not self._socket.closed:
                    raise
                break
            try:
                (data,) = frames
                return peer, decode_down(data)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                logger.warning("ignoring a malformed message at %s: %s", self.address, error)
        raise LinkClosed(f"{self.address} is closed")

    def close(self) -> None:
        """Also waits for what was sent to leave, at most the linger time."""
        if self._socket.closed:
            return
        self._socket.close()
        if self._guard is not None:
            # It may have asked to be told of its socket in this very turn of the loop: libuv ends the process when it
            # finds the descriptor closed.
            asyncio.get_running_loop().remove_reader(int(self._guard.zap_socket.getsockopt(zmq.FD)))
            self._guard.stop()
        self._context.term()


class _OnlyThis:
    """What AsyncioAuthenticator asks about a client's public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        if key != self._public:
            logger.warning("refusing a gateway with another key")
        return key == self._public
