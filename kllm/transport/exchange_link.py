"""ExchangeLink: the instance's one Link, over the gateways of a Peers channel."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kllm.messages import Down, Drain, EngineLoad, Leaving, Up
from kllm.transport.exchange import Exchange, Turn
from kllm.transport.inbox import Inbox
from kllm.transport.link import Backpressure, LinkClosed
from kllm.transport.peers import PeerKey, Peers

logger = logging.getLogger(__name__)

RETRY_S = 0.02  # between attempts to send to gateways that do not keep up
MOST_WAITING = 8192  # messages that wait for one gateway before it counts as gone


class ExchangeLink:
    """Link[Down, Up]; made inside a running loop. A gateway that does not keep up never holds up the others: what it
    does not take waits for it here, and when that is too much, it counts as gone.

    on_said: everything that the instance says, before it goes anywhere."""

    def __init__(
        self, peers: Peers, exchange: Exchange | None = None, on_said: Callable[[Up], None] = lambda _: None
    ) -> None:
        self.exchange = exchange or Exchange()
        self._on_said = on_said
        self._peers = peers
        self._inbox = Inbox()
        self._waiting: dict[PeerKey, deque[Up]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._listening = asyncio.create_task(self._listen())

    def send(self, message: Up) -> None:
        """Never raises Backpressure. Raises LinkClosed after close."""
        if self._inbox.closed:
            raise LinkClosed("the link is closed")
        self._on_said(message)
        self._do(self.exchange.said(message))

    async def recv(self) -> Down:
        return await self._inbox.get()  # type: ignore[return-value]  # only Down is put there

    def drain(self) -> None:
        """Tell the gateways that nothing more is to come, and the instance to end when it has finished what it has."""
        if not self._inbox.closed:
            self._do(self.exchange.said(Leaving()))
            self._inbox.put(Drain())

    def close(self) -> None:
        if not self._inbox.closed:
            self._inbox.close()
            self._listening.cancel()
            if self._retry is not None:
                self._retry.cancel()
            self._peers.close()

    async def _listen(self) -> None:
        try:
            while True:
                self._do(self.exchange.heard(*await self._peers.recv()))
        except LinkClosed:
            pass
        finally:  # also after a fault: an instance that hears nobody must not seem well
            self._inbox.end()

    def _do(self, turn: Turn) -> None:
        for message in turn.down:
            self._inbox.put(message)
        for peer, answer in turn.up:
            self._deliver(peer, answer)

    def _deliver(self, peer: PeerKey, message: Up) -> None:
        waiting = self._waiting.get(peer)
        if waiting is None:
            if self._send(peer, message):
                return
            waiting = self._waiting[peer] = deque()
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send_waiting)
        if isinstance(message, EngineLoad) and message.progress is None:
            return  # the next one says more
        waiting.append(message)
        if len(waiting) > MOST_WAITING:
            logger.warning("a gateway has not taken %d messages", len(waiting))
            self._lose(peer)

    def _send_waiting(self) -> None:
        self._retry = None
        for peer, waiting in list(self._waiting.items()):
            while waiting and peer in self._waiting and self._send(peer, waiting[0]):
                waiting.popleft()
            if not waiting:
                self._waiting.pop(peer, None)
        if self._waiting:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send_waiting)

    def _send(self, peer: PeerKey, message: Up) -> bool:
        """False if the gateway does not take it now. What nobody can take any more counts as sent."""
        try:
            self._peers.send(peer, message)
        except Backpressure:
            return False
        except LinkClosed:
            self._lose(peer)
        except ValueError as error:
            logger.error("cannot send %s to a gateway: %s", type(message).__name__, error)
        return True

    def _lose(self, peer: PeerKey) -> None:
        self._waiting.pop(peer, None)
        self._do(self.exchange.lost(peer))
