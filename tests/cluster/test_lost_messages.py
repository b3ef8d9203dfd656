"""Messages between gateway and instances are lost, repeated and reordered; requests are not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from support.gateways import any_running, assert_complete, make_gateway, read, started
from support.lossy_link import Weather
from support.scripted_instance import Faults, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.gateway import MAX_LOSSES, InstanceFailed
from kllm.cluster.request_stream import End
from kllm.messages import Abort, Deltas, Drain, Drained, Failed, Hello, Message, Ping, Starting, Submit


def first(kind: type[Message], count: int = 1) -> Callable[[Message], bool]:
    """True for the first `count` messages of a kind."""
    left = count

    def drop(message: Message) -> bool:
        nonlocal left
        left -= isinstance(message, kind)
        return isinstance(message, kind) and left >= 0

    return drop


def final(message: Message) -> bool:
    return isinstance(message, Deltas) and any(delta.finish_reason is not None for delta in message.items)


def test_a_lost_submit_is_repeated() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=first(Submit)))
        async with started(launcher) as gateway:
            before = asyncio.get_running_loop().time()
            stream = gateway.generate(make_request())
            assert_complete(stream, await read(stream))
            assert (stream.attempt, stream.strikes, launcher.weather.dropped) == (1, 0, 1)
            assert asyncio.get_running_loop().time() - before < 4.0

    run(main())


def test_a_lost_end_is_repeated() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather())
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=30))
            launcher.weather.drop = final
            await asyncio.sleep(2.0)
            assert launcher.weather.dropped
            launcher.weather.drop = lambda _: False
            assert_complete(stream, await read(stream))
            assert stream.attempt == 1

    run(main())


def test_output_that_stops_coming_is_noticed() -> None:
    """All later Deltas are lost, so that no gap is ever seen; the reports tell."""

    async def main() -> None:
        launcher = TaskLauncher(Faults(), weather=Weather())
        async with started(launcher) as gateway:
            launcher.faults.stuck = True
            stream = gateway.generate(make_request(max_tokens=100, ignore_eos=True))
            await asyncio.sleep(0.5)
            launcher.faults.stuck = False
            await asyncio.sleep(0.1)
            launcher.faults.stuck = True
            launcher.weather.drop = lambda message: isinstance(message, Deltas)
            launcher.faults.stuck = False
            await asyncio.sleep(0.1)
            launcher.faults.stuck = True
            launcher.weather.drop = lambda _: False
            assert stream.attempt == 0
            await asyncio.sleep(2.5)
            assert stream.attempt == 1
            launcher.faults.stuck = False
            assert_complete(stream, await read(stream))

    run(main())


def test_a_lost_abort_is_repeated() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=first(Abort)))
        launcher.faults.stuck = True
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=100))
            await asyncio.sleep(0.1)
            await stream.aclose()
            await asyncio.sleep(0.1)
            assert launcher.scripts[0].running
            await asyncio.sleep(1.1)
            assert not launcher.scripts[0].running

    run(main())


def test_hello_is_repeated_until_it_is_answered() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=first(Hello, 3)))
        async with started(launcher, start_timeout=10.0) as gateway:
            assert gateway.ready
        launcher = TaskLauncher(weather=Weather(drop=first(Hello, 1000)))
        with pytest.raises(InstanceFailed, match="not ready after 10 s"):
            await make_gateway(launcher, start_timeout=10.0).start()
        assert not launcher.running

    run(main())


def test_the_gateway_pings_every_second() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher):
            await asyncio.sleep(10.5)
            assert launcher.scripts[0].heard == [Ping()] * 11

    run(main())


@pytest.mark.parametrize("kind", [Drain, Drained])
def test_a_drain_without_an_answer_ends(kind: type[Message]) -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=first(kind, 1000)))
        gateway = make_gateway(launcher, stop_grace=5.0)
        await gateway.start()
        before = asyncio.get_running_loop().time()
        await gateway.drain(30.0)
        assert asyncio.get_running_loop().time() - before < 5.1
        assert not launcher.running
        gateway.check()

    run(main())


def test_a_failure_whose_words_are_lost() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=first(Failed, 1000)))
        launcher.failures = ["failed"]
        with pytest.raises(InstanceFailed, match="exited"):
            await make_gateway(launcher).start()
        assert not launcher.running

    run(main())


def test_lost_progress_of_a_start_does_no_harm() -> None:
    async def main() -> None:
        async with started(TaskLauncher(weather=Weather(drop=first(Starting)))) as gateway:
            assert gateway.ready

    run(main())


def test_a_link_that_always_loses_output_ends_the_request_at_last() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=lambda message: isinstance(message, Deltas)))
        async with started(launcher) as gateway:
            last = (await read(gateway.generate(make_request())))[-1]
            assert last.finish_reason == "error"
            assert f"after {MAX_LOSSES} attempts in a row: messages were lost" in (last.error or "")
            assert gateway.restarts == 0

    run(main())


def test_an_executor_that_hangs_alone_is_noticed() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, silence_limit=5.0) as gateway:
            launcher.faults.stuck = True
            await asyncio.sleep(60)  # nothing to step for
            assert gateway.restarts == 0
            stream = gateway.generate(make_request(max_tokens=20))
            await asyncio.sleep(4.0)
            assert gateway.restarts == 0
            await asyncio.sleep(2.1)
            assert gateway.restarts == 1
            launcher.faults.stuck = False
            assert_complete(stream, await read(stream))
            await asyncio.sleep(60)
            assert gateway.restarts == 1

    run(main())


def test_an_id_used_again_is_not_taken_for_a_repeated_submission() -> None:
    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(repeat=1.0, delay_s=0.5))
        async with started(launcher) as gateway:
            for _ in range(5):
                stream = gateway.generate(make_request("same", max_tokens=3))
                assert_complete(stream, await read(stream))
            attempts = [submit.attempt for submit in launcher.scripts[0].submits]
            assert attempts == sorted(set(attempts))
            assert asyncio.get_running_loop().time() < 2.0

    run(main())


def test_a_partition_is_survived_by_moving() -> None:
    async def main() -> None:
        launchers = [TaskLauncher() for _ in range(3)]
        async with started(*launchers, silence_limit=10.0) as gateway:
            await asyncio.sleep(1)
            streams = [gateway.generate(make_request(str(i), max_tokens=100, ignore_eos=True)) for i in range(9)]
            await asyncio.sleep(0.1)
            launchers[0].weather.cut = True
            results = asyncio.gather(*map(read, streams))
            await asyncio.sleep(20.0)
            launchers[0].weather.cut = False
            for stream, deltas in zip(streams, await results, strict=True):
                assert_complete(stream, deltas)

    run(main())


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_in_bad_weather(seed: int) -> None:
    """Everything at once: every request says what it would have said, once and in order; nothing runs on in vain."""

    async def main() -> None:
        rng = random.Random(seed)
        launchers = [
            TaskLauncher(
                Faults(rng=random.Random(rng.random())),
                weather=Weather(
                    rng=random.Random(rng.random()),
                    lose=rng.choice((0.0, 0.02, 0.1)),
                    repeat=rng.choice((0.0, 0.3)),
                    late=rng.choice((0.0, 0.1)),
                    delay_s=rng.choice((0.05, 1.5)),
                ),
            )
            for _ in range(rng.randint(1, 4))
        ]
        async with started(*launchers, silence_limit=20.0) as gateway:
            streams = []
            reads = []
            for i in range(40):
                stream = gateway.generate(make_request(str(i), [i + 1], max_tokens=rng.randint(1, 100)))
                streams.append(stream)
                reads.append(asyncio.create_task(read(stream)))
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.5)))
                gateway.check()
            leaving = rng.sample(range(40), 5)
            for i in leaving:
                reads[i].cancel()
            for i, (stream, reading) in enumerate(zip(streams, reads, strict=True)):
                await asyncio.wait((reading,))
                if i not in leaving:
                    assert_complete(stream, reading.result())
            assert gateway.ended[End.ERROR] == 0
            for launcher in launchers:
                launcher.weather.lose = launcher.weather.late = launcher.weather.repeat = 0.0
            await asyncio.sleep(5.0)
            assert not any(script.running for launcher in launchers for script in launcher.scripts[-1:])
        assert not any_running(launchers)

    run(main())
