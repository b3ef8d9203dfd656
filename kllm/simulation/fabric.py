"""Fabric: the network between nodes, as links that delay messages and, if told to, lose, repeat and reorder them.

A message leaves through its sender's port and enters through its receiver's, each at its bandwidth, so everything a
node sends or receives shares them. Between the ports it takes the link's latency and jitter. Without faults a link
keeps order, as TCP does; a message hit by `reorder` arrives late and lets others pass.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Generic

import msgspec

from kllm.messages import CacheDelta, CacheDump, Deltas, Down, EngineLoad, Message, Submit, Up
from kllm.simulation.node import Node
from kllm.simulation.transfer import TransferNetwork
from kllm.transport.inbox import Inbox
from kllm.transport.link import Backpressure, In, LinkClosed, Out

_ENVELOPE_BYTES = 64
_DELTA_BYTES = 48
_TOKEN_BYTES = 4


@dataclass
class Weather:
    """What the network does to messages, beside delaying them by latency_s + uniform(0, jitter_s).

    loss, duplicate, reorder: probabilities per message. late_s: how much later a reordered or repeated one arrives.
    report_loss, report_late_s: of what instances say about their caches alone, beside that: a probability, and how much
    later it arrives, in its order."""

    latency_s: float = 100e-6
    jitter_s: float = 20e-6
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_s: float = 0.5
    report_loss: float = 0.0
    report_late_s: float = 0.0

    @property
    def rough(self) -> bool:
        return bool(self.loss or self.duplicate or self.reorder)


class Fabric:
    """rng: decides what happens to messages. weather: may be changed while the simulation runs. transfers: KV between
    instances, on a network of its own."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.transfers = TransferNetwork()
        self.lost = 0
        self.repeated = 0
        self._rng = rng

    def connect(self, gateway: Node, instance: Node) -> tuple[FabricLink[Up, Down], FabricLink[Down, Up]]:
        """(the gateway's end, the instance's end) of a new link."""
        near: FabricLink[Up, Down] = FabricLink(self, gateway)
        far: FabricLink[Down, Up] = FabricLink(self, instance)
        near.peer = far  # type: ignore[assignment]
        far.peer = near  # type: ignore[assignment]
        return near, far

    def carry(self, link: FabricLink[Message, Message], message: Message | None) -> None:
        """Bring a message (None: the end of the link) to the other end, or lose it."""
        sender, receiver = link.node, link.peer.node
        if sender.unreachable or receiver.unreachable or not sender.powered or not receiver.powered:
            self.lost += 1
            return
        weather, rng = self.weather, self._rng
        if weather.report_loss or weather.report_late_s:
            if isinstance(message, CacheDelta | CacheDump):
                self._carry_report(link, message)
                return
            if type(message) is EngineLoad and weather.report_late_s:
                message = msgspec.structs.replace(message, cache_sequence=0)  # of reports that it would overtake
        loop = link.loop
        size = size_of(message)
        sent = sender.egress.pass_through(loop.time(), size)
        crossed = sent + weather.latency_s + weather.jitter_s * rng.random()
        arrival = receiver.ingress.pass_through(crossed, size)
        if not weather.rough:
            self._deliver_at(link, arrival, message)
            return
        if rng.random() < weather.loss:
            self.lost += 1
            return
        if rng.random() < weather.duplicate:
            self.repeated += 1
            loop.call_at(arrival + weather.late_s * rng.random(), link.peer.arrive, message)
        if rng.random() < weather.reorder:
            loop.call_at(arrival + weather.late_s * rng.random(), link.peer.arrive, message)
        else:
            self._deliver_at(link, arrival, message)

    def _carry_report(self, link: FabricLink[Message, Message], message: Message) -> None:
        if self._rng.random() < self.weather.report_loss:
            self.lost += 1
            return
        sent = link.node.egress.pass_through(link.loop.time(), size_of(message))
        late = self.weather.latency_s + self.weather.report_late_s
        link.loop.call_at(sent + late, link.peer.arrive, message)

    def _deliver_at(self, link: FabricLink[Message, Message], arrival: float, message: Message | None) -> None:
        """In order with what this link carried before."""
        if arrival < link.last_arrival:
            arrival = link.last_arrival
        link.last_arrival = arrival
        link.loop.call_at(arrival, link.peer.arrive, message)


def size_of(message: Message | None) -> int:
    """About the bytes of the encoded message: encoding it would cost more than all else that a link does."""
    if type(message) is Deltas:
        return _ENVELOPE_BYTES + _DELTA_BYTES * len(message.items)
    if type(message) is Submit:
        return _ENVELOPE_BYTES + _TOKEN_BYTES * (len(message.request.prompt_token_ids) + len(message.outputs))
    if type(message) is EngineLoad:
        return _ENVELOPE_BYTES + _DELTA_BYTES * len(message.progress or ())
    if isinstance(message, CacheDelta | CacheDump):
        return _ENVELOPE_BYTES + sum(len(change.hashes) for change in message.changes)
    return _ENVELOPE_BYTES


class FabricLink(Generic[In, Out]):
    """One end of a link over the fabric (the Link port). last_arrival: of what this end sent."""

    CAPACITY = 65536  # messages that may wait to be received

    def __init__(self, fabric: Fabric, node: Node) -> None:
        self.node = node
        self.peer: FabricLink[Message, Message]
        self.loop = asyncio.get_running_loop()
        self.last_arrival = 0.0
        self.inbox = Inbox()
        self._fabric = fabric

    def send(self, message: Out) -> None:
        if self.inbox.closed or self.inbox.ended:
            raise LinkClosed("the link is closed")
        if len(self.peer.inbox) >= self.CAPACITY:
            raise Backpressure(f"{self.CAPACITY} messages wait to be received")
        self._hand_over(message)

    def _hand_over(self, message: Message | None) -> None:
        self.node.when_running(lambda: self._fabric.carry(self, message))  # type: ignore[arg-type]

    def arrive(self, message: Message | None) -> None:
        """A message, or the end of the link, has crossed the network."""
        if message is None:
            self.node.when_running(self.inbox.end)
        else:
            self.node.when_running(lambda: self.inbox.put(message))

    async def recv(self) -> In:
        return await self.inbox.get()  # type: ignore[return-value]  # the peer's Out is our In

    def close(self) -> None:
        """The other end learns of it when the network lets it."""
        if not self.inbox.closed:
            self.inbox.close()
            self._hand_over(None)

    def cut(self) -> None:
        """This end vanishes without a word (power failure)."""
        self.inbox.close()
