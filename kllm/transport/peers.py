"""The Peers port: one end of an instance's channel to any number of gateways."""

from __future__ import annotations

from typing import Protocol

from kllm.messages import Down, Up

PeerKey = bytes  # names one connection; never used again for another


class Peers(Protocol):
    """Gateways come by themselves: a key that has not been seen before is a new one.

    send: never blocks; raises Backpressure, LinkClosed (this gateway is gone, or the channel is closed) or ValueError
    (larger than any message may be). recv: the next message and whose it is; raises LinkClosed when the channel is
    closed. close: idempotent; what was sent may still leave.
    """

    def send(self, peer: PeerKey, message: Up) -> None: ...

    async def recv(self) -> tuple[PeerKey, Down]: ...

    def close(self) -> None: ...
