"""The gateway over one scripted instance in virtual time. What several bring is in test_gateway_instances.py."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import assert_complete, make_gateway, read, started
from support.lossy_link import Weather
from support.scripted_instance import (
    HELLO,
    LATE_POISON,
    POISON,
    Faults,
    TaskLauncher,
    make_request,
    reference,
)
from support.virtual_time import run

from kllm.cluster.gateway import InstanceFailed, QueueFull, Unavailable
from kllm.cluster.request_stream import End
from kllm.messages import PROTOCOL_VERSION, Message, Starting, Submit

# --- start ---


def test_start_reports_progress_and_readiness() -> None:
    async def main() -> None:
        phases: list[tuple[int, Starting]] = []
        gateway = make_gateway(TaskLauncher(), on_starting=lambda *progress: phases.append(progress))
        assert not gateway.ready
        with pytest.raises(Unavailable, match="loading"):
            gateway.generate(make_request())
        assert await gateway.start() == gateway.info == HELLO
        assert gateway.ready
        assert gateway.healthy
        assert phases == [(0, Starting(phase="loading weights", fraction=0.5))]
        await gateway.close()
        await gateway.close()
        assert not gateway.ready

    run(main())


@pytest.mark.parametrize(
    ("failure", "message"), [("launch", "no such program"), ("failed", "out of memory"), ("exit", "exited")]
)
def test_a_start_that_fails_says_why(failure: str, message: str) -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        launcher.failures = [failure]
        with pytest.raises(InstanceFailed, match=message):
            await make_gateway(launcher).start()
        assert not launcher.running

    run(main())


def test_a_start_that_takes_too_long() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        launcher.start_s = 100.0
        with pytest.raises(InstanceFailed, match=r"not ready after 30 s; it was at: loading weights \(50%\)"):
            await make_gateway(launcher, start_timeout=30.0).start()
        assert not launcher.running

    run(main())


def test_an_instance_of_another_protocol_version_is_refused() -> None:
    async def main() -> None:
        launcher = TaskLauncher(hello=type(HELLO)(instance_id="i", incarnation="1", version=PROTOCOL_VERSION + 1))
        with pytest.raises(InstanceFailed, match="version"):
            await make_gateway(launcher).start()

    run(main())


def test_a_cancelled_start_leaves_nothing_running() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        launcher.start_s = 100.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(make_gateway(launcher).start(), 3.0)
        assert not launcher.running

    run(main())


# --- streams ---


def test_many_streams_at_once() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            streams = [gateway.generate(make_request(str(i), [i + 1], max_tokens=i + 1)) for i in range(50)]
            assert gateway.in_flight == 50
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)
            assert gateway.ended == {End.COMPLETED: 50, End.ERROR: 0, End.ABORT: 0}

    run(main())


def test_seeds_are_drawn_only_for_requests_without_one() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            own = gateway.generate(make_request("a", seed=5))
            drawn = [gateway.generate(make_request(name)) for name in "bc"]
            assert own.request.params.seed == 5
            assert len({None, 5, *(stream.request.params.seed for stream in drawn)}) == 4

    run(main())


def test_a_slow_reader_gets_waiting_deltas_as_one() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            stream = gateway.generate(make_request(max_tokens=60, logprobs=0, prompt_logprobs=0, ignore_eos=True))
            first = await anext(stream)
            await asyncio.sleep(10)
            assert gateway.in_flight == 0
            rest = await read(stream)
            assert len(rest) == 1
            assert_complete(stream, [first, *rest])
            assert [entry.token_id for entry in rest[0].logprobs or ()] == rest[0].token_ids
            assert first.prompt_logprobs == [None] * 3
            assert rest[0].prompt_logprobs is None

    run(main())


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_a_client_that_leaves_aborts_its_request(how: str) -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=100, ignore_eos=True))
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                await stream.aclose()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(read(stream), 0.1)
            assert gateway.in_flight == 0
            assert gateway.ended[End.ABORT] == 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not launcher.scripts[0].running
            assert await read(stream) == []

    run(main())


def test_an_abort_overtakes_a_submission_that_no_instance_has_seen() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            launcher.instances[0].kill()
            await asyncio.sleep(0.1)
            stream = gateway.generate(make_request())
            await stream.aclose()
            await asyncio.sleep(5)
            assert gateway.ready
            assert not launcher.scripts[1].submits

    run(main())


def test_messages_wait_while_the_link_is_full() -> None:
    async def main() -> None:
        async with started(TaskLauncher(capacity=2)) as gateway:
            streams = [gateway.generate(make_request(str(i), max_tokens=3)) for i in range(40)]
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)

    run(main())


def test_repeated_stale_and_lost_tokens_never_reach_the_client() -> None:
    async def main() -> None:
        faults = Faults(repeat=0.5, stale=0.5, skip=0.02)
        async with started(TaskLauncher(faults)) as gateway:
            streams = [gateway.generate(make_request(str(i), [i + 1], max_tokens=100)) for i in range(30)]
            results = await asyncio.gather(*map(read, streams))
            assert max(stream.attempt for stream in streams) > 0
            for stream, deltas in zip(streams, results, strict=True):
                assert_complete(stream, deltas)

    run(main())


# --- refusals ---


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, max_queue=40) as gateway:
            for _ in range(10):  # a history of one request per 0.5 s or so
                await read(gateway.generate(make_request(max_tokens=100, ignore_eos=True)))
            for i in range(40):
                gateway.generate(make_request(str(i)))
            with pytest.raises(QueueFull) as refusal:
                gateway.generate(make_request("one too many"))
            assert refusal.value.retry_after_s == 2
            await asyncio.sleep(1)
            await read(gateway.generate(make_request("later")))

    run(main())


def test_an_id_in_flight_cannot_be_used_twice() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            stream = gateway.generate(make_request("a"))
            with pytest.raises(ValueError, match="already running"):
                gateway.generate(make_request("a"))
            assert_complete(stream, await read(stream))
            again = gateway.generate(make_request("a"))
            assert_complete(again, await read(again))

    run(main())


# --- failover ---


def test_a_death_is_invisible_but_for_a_pause() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=100, ignore_eos=True, logprobs=2, prompt_logprobs=0))
            deltas = [await anext(stream) for _ in range(5)]
            launcher.instances[0].kill()
            deltas += await read(stream)
            assert_complete(stream, deltas)
            assert {delta.num_cached_tokens for delta in deltas} == {10}
            assert [delta.timings is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
            assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
            assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
            submit = launcher.scripts[1].submits[0]
            assert submit.attempt == 1
            assert submit.outputs == stream.outputs[: len(submit.outputs)]
            assert len(submit.outputs) >= 5
            assert submit.request.params.seed == stream.request.params.seed
            assert submit.request.params.prompt_logprobs is None
            assert gateway.restarts == 1

    run(main())


def test_a_request_that_no_link_can_carry_fails_alone() -> None:
    """It ends while those that wait with it are being handed out."""

    def too_large(message: Message) -> bool:
        if isinstance(message, Submit) and message.request.request_id == "large":
            raise ValueError("a message of 5 GB is larger than allowed")
        return False

    async def main() -> None:
        launcher = TaskLauncher(weather=Weather(drop=too_large))
        async with started(launcher) as gateway:
            launcher.instances[0].kill()
            await asyncio.sleep(0.1)
            assert not gateway.ready
            names = ("before", "large", "after", "last")
            streams = {name: gateway.generate(make_request(name, max_tokens=20, ignore_eos=True)) for name in names}
            deltas = {name: await read(stream) for name, stream in streams.items()}
            assert [(delta.finish_reason, delta.error) for delta in deltas.pop("large")] == [
                ("error", "a message of 5 GB is larger than allowed")
            ]
            for name, received in deltas.items():
                assert_complete(streams[name], received)
            assert gateway.restarts == 1

    run(main())


def test_counters_add_up_over_incarnations() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            for i in range(3):
                await read(gateway.generate(make_request(max_tokens=100, ignore_eos=True)))
                await asyncio.sleep(1.1)
                assert gateway.load.steps > 30
                launcher.instances[i].kill()
                await asyncio.sleep(30)
            assert gateway.restarts == 3
            assert gateway.load.steps == 0
            assert gateway.totals.steps == gateway.totals.prefix_queries > 90

    run(main())


def test_a_finish_lost_in_a_crash_still_comes() -> None:
    async def main() -> None:
        launcher = TaskLauncher(Faults(late_finish=1.0))
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=1))
            first = await anext(stream)
            assert first.finish_reason is None
            launcher.instances[0].kill()
            assert_complete(stream, [first, *await read(stream)])

    run(main())


def test_a_hung_instance_is_replaced_but_a_slow_or_idle_one_is_not() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, silence_limit=5.0) as gateway:
            launcher.faults.hung = True
            await asyncio.sleep(100)  # idle: owes nothing
            assert gateway.restarts == 0
            stream = gateway.generate(make_request(max_tokens=10))
            await asyncio.sleep(4.9)
            assert gateway.restarts == 0
            launcher.faults.hung = False
            await asyncio.sleep(0.5)
            assert_complete(stream, await read(stream))
            launcher.faults.hung = True
            stream = gateway.generate(make_request(max_tokens=10))
            await asyncio.sleep(5.1)
            assert gateway.restarts == 1
            launcher.faults.hung = False
            assert_complete(stream, await read(stream))

    run(main())


@pytest.mark.parametrize("poison", [POISON, LATE_POISON])
def test_a_request_that_kills_instances_ends_with_an_error_and_harms_no_other(poison: int) -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            innocent = [gateway.generate(make_request(f"a{i}", [i + 1], max_tokens=50)) for i in range(10)]
            guilty = [gateway.generate(make_request(f"p{i}", [poison, i], max_tokens=50)) for i in range(3)]
            later = [gateway.generate(make_request(f"b{i}", [i + 1], max_tokens=5)) for i in range(10)]
            results = await asyncio.gather(*map(read, innocent + later))
            for stream, deltas in zip(innocent + later, results, strict=True):
                assert_complete(stream, deltas)
            for stream in guilty:
                last = (await read(stream))[-1]
                assert last.finish_reason == "error"
                assert "after 3 attempts" in (last.error or "")
            assert gateway.ended == {End.COMPLETED: 20, End.ERROR: 3, End.ABORT: 0}
            assert gateway.restarts <= 7
            stream = gateway.generate(make_request())
            assert_complete(stream, await read(stream))

    run(main())


def test_it_gives_up_after_too_many_failures_in_a_row() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, max_restarts=3) as gateway:
            streams = [gateway.generate(make_request(str(i), max_tokens=100, ignore_eos=True)) for i in range(3)]
            await anext(streams[0])
            launcher.failures = ["failed"] * 10
            launcher.instances[0].kill()
            for deltas in await asyncio.gather(*map(read, streams)):
                assert deltas[-1].finish_reason == "error"
                assert "out of memory" in (deltas[-1].error or "")
            assert len(launcher.launched_at) == 1 + 4
            pauses = [b - a for a, b in zip(launcher.launched_at[1:], launcher.launched_at[2:], strict=False)]
            assert pauses == sorted(pauses)
            assert pauses[0] > 0.2
            assert not gateway.healthy
            assert not gateway.ready
            with pytest.raises(Unavailable, match="out of memory") as refusal:
                gateway.generate(make_request())
            assert refusal.value.retry_after_s is None

    run(main())


def test_an_idle_instance_that_keeps_dying_counts_as_failing() -> None:
    async def main() -> None:
        launcher = TaskLauncher(Faults(crash=1.0))
        async with started(launcher, max_restarts=3) as gateway:
            await asyncio.sleep(600)
            assert not gateway.healthy
            assert gateway.restarts == 3

    run(main())


def test_requests_are_taken_during_a_short_outage_only() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher, max_outage=30.0) as gateway:
            launcher.start_s = 100.0
            launcher.instances[0].kill()
            await asyncio.sleep(5)
            assert not gateway.ready
            stream = gateway.generate(make_request())
            await asyncio.sleep(30)
            with pytest.raises(Unavailable, match="restarted") as refusal:
                gateway.generate(make_request("late"))
            assert refusal.value.retry_after_s
            assert_complete(stream, await read(stream))
            await read(gateway.generate(make_request("late")))

    run(main())


# --- the end ---


def test_drain_lets_requests_finish() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        gateway = make_gateway(launcher)
        await gateway.start()
        stream = gateway.generate(make_request(max_tokens=100))
        draining = asyncio.create_task(gateway.drain(30.0))
        await asyncio.sleep(0.01)
        assert not gateway.ready
        with pytest.raises(Unavailable, match="shutting down"):
            gateway.generate(make_request("late"))
        assert_complete(stream, await read(stream))
        await draining
        assert launcher.scripts[0].draining
        assert not launcher.running
        gateway.check()

    run(main())


def test_drain_aborts_what_does_not_finish_in_time() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        gateway = make_gateway(launcher)
        await gateway.start()
        stream = gateway.generate(make_request(max_tokens=150, ignore_eos=True))
        await gateway.drain(0.2)
        deltas = await read(stream)
        assert deltas[-1].finish_reason == "abort"
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert 0 < len(tokens) < 150
        assert tokens == reference(stream.request)[0][: len(tokens)]
        assert gateway.ended == {End.COMPLETED: 0, End.ERROR: 0, End.ABORT: 1}
        assert launcher.scripts[0].draining
        assert not launcher.running
        gateway.check()

    run(main())


def test_drain_survives_a_death() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        gateway = make_gateway(launcher)
        await gateway.start()
        stream = gateway.generate(make_request(max_tokens=100))
        draining = asyncio.create_task(gateway.drain(30.0))
        await asyncio.sleep(0.05)
        launcher.instances[0].kill()
        assert_complete(stream, await read(stream))
        await draining
        assert not launcher.running

    run(main())


@pytest.mark.parametrize("when", [0.0, 0.1, 0.3, 0.55])
def test_close_during_a_restart(when: float) -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            stream = gateway.generate(make_request(max_tokens=100))
            await anext(stream)
            launcher.instances[0].kill()
            await asyncio.sleep(when)
            await gateway.close()
            assert (await read(stream))[-1].finish_reason == "abort"
            assert not launcher.running

    run(main())
