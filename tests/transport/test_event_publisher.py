from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio
from support.event_consumer import EventConsumer

from kllm.events_config import KVEventsConfig
from kllm.transport.event_publisher import EventPublisher
from kllm.transport.event_subscriber import EventSubscriber, Lost, Received, Restarted

Run = Callable[[Coroutine[Any, Any, None]], None]
WAIT_S = 10.0
END = b"\xff" * 8


def encode(ts: float, events: Sequence[object]) -> Iterator[bytes]:
    """In these tests an event is anything JSON can hold; the real format has its own tests."""
    yield json.dumps([ts, list(events)]).encode()


def decode(payload: bytes) -> list[object]:
    events = json.loads(payload)[1]
    assert isinstance(events, list)
    return events


def config(**options: object) -> KVEventsConfig:
    """On ports that are free."""
    return KVEventsConfig.model_validate(
        {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **options}
    )


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_main(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 2 * WAIT_S))

    return run_main


def test_every_message_has_topic_sequence_and_payload() -> None:
    publisher = EventPublisher(config(topic="kv"), encode, clock=lambda: 2.5)
    with closing(publisher), EventConsumer(publisher.endpoint, "kv") as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        publisher.publish(["a"])
        publisher.publish([])  # nothing to say
        publisher.publish(["b", "c"])
        assert consumer.receive() == (b"kv", 0, b'[2.5, ["a"]]')
        assert consumer.receive() == (b"kv", 1, b'[2.5, ["b", "c"]]')


def test_it_knows_how_many_are_subscribed() -> None:
    publisher = EventPublisher(config(), encode)
    with closing(publisher), EventConsumer(publisher.endpoint):
        with EventConsumer(publisher.endpoint):
            assert publisher.wait_for_subscribers(2, WAIT_S)
        assert not publisher.wait_for_subscribers(3, timeout=0)


def test_closing_sends_what_was_published_and_ends_publishing() -> None:
    publisher = EventPublisher(config(), encode)
    with EventConsumer(publisher.endpoint) as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        for event in range(500):
            publisher.publish([event])
        publisher.close()
        assert [consumer.receive()[1] for _ in range(500)] == list(range(500))
    publisher.close()
    publisher.publish(["late"])
    assert (publisher.counts.sent, publisher.counts.dropped) == (500, 1)


def test_a_full_queue_gives_up_the_oldest_and_the_gap_shows() -> None:
    entered, let_go = threading.Event(), threading.Event()

    def stuck(ts: float, events: Sequence[object]) -> Iterator[bytes]:
        entered.set()
        assert let_go.wait(WAIT_S)
        yield from encode(ts, events)

    publisher = EventPublisher(config(max_queue_size=3), stuck)
    with closing(publisher), EventConsumer(publisher.endpoint) as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        publisher.publish([0])
        assert entered.wait(WAIT_S)  # 0 is with the sender, the queue is empty
        for event in range(1, 10):
            publisher.publish([event])  # returns although nothing is sent
        assert publisher.counts.dropped == 6
        let_go.set()
        received = [consumer.receive() for _ in range(4)]
        assert [(sequence, decode(payload)) for _, sequence, payload in received] == [
            (0, [0]),
            (7, [7]),
            (8, [8]),
            (9, [9]),
        ]


def test_a_batch_that_cannot_be_encoded_is_a_gap_and_no_more() -> None:
    publisher = EventPublisher(config(), encode)
    with closing(publisher), EventConsumer(publisher.endpoint) as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        publisher.publish([{1, 2}])
        publisher.publish(["fine"])
        assert consumer.receive()[1] == 1
        assert publisher.counts.failed == 1


def test_replay_has_what_the_buffer_has_and_looks_like_the_stream() -> None:
    publisher = EventPublisher(config(topic="kv", buffer_steps=100), encode)
    assert publisher.replay_endpoint is not None
    with closing(publisher), EventConsumer(publisher.endpoint) as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        assert consumer.replay(publisher.replay_endpoint, 0) == []
        for event in range(300):
            publisher.publish([event])
        stream = [consumer.receive() for _ in range(300)]
        for first, replayed in (
            (0, stream[200:]),
            (250, stream[250:]),
            (299, stream[299:]),
            (300, []),
            (2**64 - 1, []),
        ):
            assert consumer.replay(publisher.replay_endpoint, first) == replayed
        assert publisher.counts.replays == 6


def test_malformed_requests_are_ignored() -> None:
    publisher = EventPublisher(config(), encode)
    assert publisher.replay_endpoint is not None
    with closing(publisher), EventConsumer(publisher.endpoint) as consumer:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        publisher.publish(["a"])
        stream = [consumer.receive()]
        malformed = [[b""], [number(0)], [b"", b"123"], [b"x", number(0)], [b"", number(0), b""], [b"", b"", b"", b""]]
        assert consumer.replay(publisher.replay_endpoint, 0, *malformed) == stream
        assert (publisher.counts.malformed, publisher.counts.replays) == (len(malformed), 1)


def test_a_huge_request_ends_its_connection_only() -> None:
    publisher = EventPublisher(config(), encode)
    assert publisher.replay_endpoint is not None
    with closing(publisher), EventConsumer(publisher.endpoint) as consumer, zmq.Context() as context:
        attacker = context.socket(zmq.DEALER)
        attacker.linger = 0
        monitor = attacker.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        attacker.connect(publisher.replay_endpoint)
        attacker.send_multipart([b"", bytes(2**20)])
        assert monitor.poll(int(WAIT_S * 1000))
        attacker.disable_monitor()
        attacker.close()
        assert consumer.replay(publisher.replay_endpoint, 0) == []


def test_a_port_in_use_is_said_clearly() -> None:
    publisher = EventPublisher(config(), encode)
    with closing(publisher):
        with pytest.raises(
            OSError, match=f"cannot publish cache events at {publisher.endpoint}: Address already in use"
        ):
            EventPublisher(config(endpoint=publisher.endpoint), encode)
        with pytest.raises(OSError, match=f"{publisher.replay_endpoint}: Address already in use"):
            EventPublisher(config(replay_endpoint=publisher.replay_endpoint), encode)
        with pytest.raises(OSError, match=r"cannot publish cache events at tcp://192\.0\.2\.1:5557: "):
            EventPublisher(config(endpoint="tcp://192.0.2.1:5557"), encode)


def test_each_rank_has_its_own_endpoints(tmp_path: Path) -> None:
    shared = config(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    publishers = [EventPublisher(shared, encode, rank) for rank in range(3)]
    assert publishers[2].endpoint == f"ipc://{tmp_path}/events_dp2"
    assert publishers[2].replay_endpoint == f"ipc://{tmp_path}/replay_dp2"
    for publisher in publishers:
        publisher.close()


def test_a_slow_consumer_loses_batches_and_gets_them_by_replay(tmp_path: Path) -> None:
    done = threading.Event()

    def last_sets_done(ts: float, events: Sequence[object]) -> Iterator[bytes]:
        yield json.dumps([ts, list(events), "x" * 65536]).encode()
        if events[0] == 199:
            done.set()

    publisher = EventPublisher(config(endpoint=f"ipc://{tmp_path}/events", hwm=1), last_sets_done)
    assert publisher.replay_endpoint is not None
    with closing(publisher), EventConsumer(publisher.endpoint, rcvhwm=1, rcvbuf=65536) as slow:
        assert publisher.wait_for_subscribers(1, WAIT_S)
        for event in range(200):
            publisher.publish([event])
        assert done.wait(WAIT_S)  # the sender did not wait for the consumer
        assert len(slow.waiting()) < 200
        replayed = slow.replay(publisher.replay_endpoint, 0)
        assert [decode(payload) for _, _, payload in replayed] == [[event] for event in range(200)]


# What follows is EventSubscriber, with real publishers where they do what the test needs, else with scripted sockets.


def subscriber(publisher: EventPublisher[object], **options: Any) -> EventSubscriber[object]:
    return EventSubscriber(publisher.endpoint, publisher.replay_endpoint, decode=decode, **options)


async def read(source: EventSubscriber[object], count: int) -> list[Received[object] | Lost | Restarted]:
    return [await anext(source) for _ in range(count)]


def received(first: int, last: int) -> list[Received[object]]:
    return [Received(sequence, [sequence]) for sequence in range(first, last + 1)]


def test_a_late_subscriber_gets_history_then_the_stream(run: Run) -> None:
    async def main() -> None:
        publisher = EventPublisher(config(), encode)
        for event in range(5):
            publisher.publish([event])
        with closing(publisher), closing(subscriber(publisher)) as source:
            assert await read(source, 5) == received(0, 4)
            assert await asyncio.to_thread(publisher.wait_for_subscribers, 1, WAIT_S)
            publisher.publish([5])
            assert await read(source, 1) == received(5, 5)

    run(main())


def test_what_the_buffer_no_longer_has_is_lost(run: Run) -> None:
    async def main() -> None:
        publisher = EventPublisher(config(buffer_steps=4), encode)
        with closing(publisher), EventConsumer(publisher.endpoint) as early:
            assert publisher.wait_for_subscribers(1, WAIT_S)
            for event in range(10):
                publisher.publish([event])
            assert [early.receive()[1] for _ in range(10)] == list(range(10))
            with closing(subscriber(publisher)) as source:
                assert await read(source, 5) == [Lost(0, 5), *received(6, 9)]
                assert source.counts.lost == 6

    run(main())


def test_a_flood_arrives_whole_and_in_order(run: Run, tmp_path: Path) -> None:
    """hwm=1: most of it can only come by replay."""

    async def main() -> None:
        publisher = EventPublisher(config(endpoint=f"ipc://{tmp_path}/events", hwm=1), encode)
        with closing(publisher), closing(subscriber(publisher, quiet_s=0.1)) as source:
            assert await asyncio.to_thread(publisher.wait_for_subscribers, 1, WAIT_S)
            for event in range(3000):
                publisher.publish([event])
            assert await read(source, 3000) == received(0, 2999)

    run(main())


@pytest.mark.parametrize("published", [2, 3, 10])
def test_a_restarted_publisher_is_noticed_even_if_its_numbers_fit(run: Run, tmp_path: Path, published: int) -> None:
    options = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}

    async def main() -> None:
        before = EventPublisher(config(**options), encode, clock=lambda: 1.0)
        for event in range(3):
            before.publish([event])
        with closing(subscriber(before)) as source:
            assert await read(source, 3) == received(0, 2)
            before.close()
            after = EventPublisher(config(**options), encode, clock=lambda: 2.0)
            with closing(after):
                for event in range(published):
                    after.publish([event])
                assert await read(source, 1 + published) == [Restarted(), *received(0, published - 1)]
                assert source.counts.restarts == 1

    run(main())


def test_without_replay_gaps_are_lost_and_going_back_is_a_restart(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(EventSubscriber(peer.endpoint, decode=decode)) as source:
                await peer.subscribed()
                for sequence in (2, 3, 7, 0, 1):
                    await peer.send(sequence)
                assert await read(source, 8) == [
                    *(Lost(0, 1), *received(2, 3), Lost(4, 6), *received(7, 7)),
                    *(Restarted(), *received(0, 1)),
                ]

    run(main())


def test_a_read_that_is_cancelled_loses_nothing(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(peer.subscriber()) as source:
                await peer.subscribed()
                reading = asyncio.ensure_future(anext(source))
                await peer.request()
                reading.cancel()  # in the middle of a replay
                with pytest.raises(asyncio.CancelledError):
                    await reading
                complete = asyncio.ensure_future(read(source, 2))
                client, first = await peer.request()
                assert first == 0
                await peer.reply(client, 0, 1)
                await peer.end(client)
                assert await complete == received(0, 1)
                for _ in range(3):
                    reading = asyncio.ensure_future(anext(source))
                    await asyncio.sleep(0)  # now it waits for the stream
                    reading.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await reading
                await peer.send(1)  # came by replay already
                await peer.send(2)
                assert await read(source, 1) == received(2, 2)

    run(main())


def test_the_end_of_the_stream_is_asked_for_when_it_is_quiet(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(peer.subscriber(quiet_s=0.05)) as source:
                reading = asyncio.ensure_future(read(source, 2))
                client, _ = await peer.request()
                await peer.reply(client, 0)
                await peer.end(client)
                client, first = await peer.request()  # nothing has arrived since
                assert first == 0  # to prove that it is the same publisher
                await peer.reply(client, 0, 1)
                await peer.end(client)
                assert await reading == received(0, 1)

    run(main())


def test_replies_without_topic_and_holes_in_them_are_understood(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(peer.subscriber()) as source:
                reading = asyncio.ensure_future(read(source, 3))
                client, _ = await peer.request()
                for sequence in (0, 4):
                    await peer.router.send_multipart([client, b"", number(sequence), peer.payload(sequence)])
                await peer.router.send_multipart([client, b"", END, b""])
                assert await reading == [*received(0, 0), Lost(1, 3), *received(4, 4)]

    run(main())


def test_no_answer_to_a_replay_is_a_loss_and_the_stream_goes_on(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(peer.subscriber(replay_timeout_s=0.05)) as source:
                reading = asyncio.ensure_future(read(source, 3))
                await peer.subscribed()
                await peer.request()
                await peer.send(2)
                await peer.send(3)
                assert await reading == [Lost(0, 1), *received(2, 3)]
                assert source.counts.replay_timeouts == 2

    run(main())


def test_malformed_messages_are_counted_and_never_fatal(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            with closing(peer.subscriber()) as source:
                reading = asyncio.ensure_future(read(source, 4))
                await peer.subscribed()
                client, _ = await peer.request()
                for frames in ([b""], [b"", b"1"], [b"", b"", b"short", b"x"], [b"", b"", b"", number(0), b""]):
                    await peer.router.send_multipart([client, *frames])
                await peer.reply(client, 0)
                await peer.end(client)
                for frames in ([b"alone"], [b"kv", b"short", b"{}"], [b"kv", number(1), b"{}", b"more"]):
                    await peer.publisher.send_multipart(frames)
                await peer.publisher.send_multipart([b"kv", number(1), b"not json"])
                await peer.send(2)
                await peer.send(3)
                assert await reading == [*received(0, 0), Lost(1, 1), *received(2, 3)]
                assert source.counts.malformed == 8

    run(main())


def test_closing_ends_the_iteration_wherever_it_waits(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scripted(tmp_path) as peer:
            for replaying in (True, False):
                source = peer.subscriber() if replaying else EventSubscriber(peer.endpoint, decode=decode)
                reading = asyncio.ensure_future(consume(source))
                await (peer.request() if replaying else peer.subscribed())
                source.close()
                await reading
                source.close()

    async def consume(source: EventSubscriber[object]) -> None:
        async for _ in source:
            pass

    run(main())


def test_a_bad_endpoint_is_said_clearly(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="cannot subscribe to nowhere: "):
            EventSubscriber("nowhere", decode=decode)

    run(main())


class Scripted:
    """A publisher that does what the test says: raw sockets, so that gaps and silence can be made."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"

    async def __aenter__(self) -> Scripted:
        self._context = zmq.asyncio.Context()
        self.publisher = self._context.socket(zmq.XPUB)
        self.publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.publisher.bind(self.endpoint)
        self.router = self._context.socket(zmq.ROUTER)
        self.router.bind(self.replay_endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def subscriber(self, **options: Any) -> EventSubscriber[object]:
        return EventSubscriber(self.endpoint, self.replay_endpoint, decode=decode, **options)

    def payload(self, sequence: int) -> bytes:
        return json.dumps([1.0, [sequence]]).encode()

    async def subscribed(self) -> None:
        while await self.publisher.recv() != b"\1":
            pass

    async def send(self, sequence: int) -> None:
        await self.publisher.send_multipart([b"", number(sequence), self.payload(sequence)])

    async def request(self) -> tuple[bytes, int]:
        """(who asks, the first sequence number it wants)"""
        client, empty, first = await self.router.recv_multipart()
        assert empty == b""
        return client, int.from_bytes(first, "big")

    async def reply(self, client: bytes, *sequences: int) -> None:
        for sequence in sequences:
            await self.router.send_multipart([client, b"", b"kv", number(sequence), self.payload(sequence)])

    async def end(self, client: bytes) -> None:
        await self.router.send_multipart([client, b"", b"", END, b""])
