"""The Link port: an ordered, bidirectional message channel between a gateway and one instance."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kllm.messages import Message

In = TypeVar("In", bound=Message, covariant=True)
Out = TypeVar("Out", bound=Message, contravariant=True)


class LinkClosed(ConnectionError):
    """The peer is gone, or this end was closed. Messages not yet received are lost."""


class Backpressure(RuntimeError):
    """The peer does not keep up: the message was not taken. The caller decides whether to wait or fail."""


class Link(Protocol[In, Out]):
    """One end of a channel. Messages arrive whole and in order, or the link is closed.

    send: never blocks; raises LinkClosed or Backpressure.
    recv: waits for the next message; raises LinkClosed when the other end is gone and nothing is left.
    close: idempotent; wakes a waiting recv with LinkClosed.
    """

    def send(self, message: Out) -> None: ...

    async def recv(self) -> In: ...

    def close(self) -> None: ...
