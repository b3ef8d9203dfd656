"""The gateway over several scripted instances in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest
from support.gateways import any_running, assert_complete, make_gateway, read, started
from support.scripted_instance import HELLO, LATE_POISON, POISON, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.cache_routing import CacheAware
from kllm.cluster.external.block_names import FINGERPRINT
from kllm.cluster.gateway import Gateway, InstanceFailed, RequestStream, Unavailable
from kllm.cluster.request_stream import End
from kllm.cluster.routing import RoundRobin
from kllm.cluster.slot import add_counters
from kllm.messages import EngineLoad
from kllm.request import InvalidRequest


def make_launchers(count: int) -> list[TaskLauncher]:
    return [TaskLauncher() for _ in range(count)]


def place_of(gateway: Gateway, stream: RequestStream) -> int:
    """Index of the slot that a request is assigned to."""
    return next(slot.index for slot in gateway._slots if stream.request.request_id in slot.assigned)


# --- start ---


def test_start_returns_with_the_first_and_the_others_join() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        for launcher, start_s in zip(launchers, (20.0, 1.0, 5.0), strict=True):
            launcher.start_s = start_s
        loop = asyncio.get_running_loop()
        async with started(*launchers) as gateway:
            assert loop.time() == 1.0
            assert gateway.ready
            for i in range(6):
                gateway.generate(make_request(str(i), max_tokens=100, ignore_eos=True))
            await asyncio.sleep(20)
            streams = [gateway.generate(make_request(f"b{i}", max_tokens=100, ignore_eos=True)) for i in range(6)]
            assert Counter(place_of(gateway, stream) for stream in streams) == {0: 2, 1: 2, 2: 2}
            assert gateway.restarts == 0

    run(main())


def test_one_that_cannot_start_is_tried_again_and_given_up_alone() -> None:
    async def main() -> None:
        launchers = make_launchers(2)
        launchers[0].failures = ["failed", "exit"]
        launchers[1].start_s = 3.0
        async with started(*launchers) as gateway:
            await asyncio.sleep(10)
            assert gateway.restarts == 2
            assert [slot.ready for slot in gateway._slots] == [True, True]
        launchers = make_launchers(2)
        launchers[1].failures = ["failed"] * 100
        async with started(*launchers, max_restarts=2) as gateway:
            await asyncio.sleep(100)
            assert gateway.healthy
            assert gateway.ready
            assert len(launchers[1].launched_at) == 3
            stream = gateway.generate(make_request())
            assert_complete(stream, await read(stream))

    run(main())


def test_start_fails_when_every_first_start_fails() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        for launcher, failure in zip(launchers, ("failed", "exit", "launch"), strict=True):
            launcher.failures = [failure] * 9
        with pytest.raises(InstanceFailed, match="out of memory"):
            await make_gateway(*launchers).start()
        assert not any_running(launchers)
        assert [len(launcher.launched_at) for launcher in launchers] == [1, 1, 1]

    run(main())


def test_a_cancelled_start_leaves_nothing_running() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        for launcher in launchers:
            launcher.start_s = 100.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(make_gateway(*launchers).start(), 3.0)
        assert not any_running(launchers)

    run(main())


def test_admission_is_for_the_smallest_instance() -> None:
    async def main() -> None:
        small = type(HELLO)(**{**{f: getattr(HELLO, f) for f in HELLO.__struct_fields__}, "num_blocks": 5})
        short = type(HELLO)(**{**{f: getattr(HELLO, f) for f in HELLO.__struct_fields__}, "max_model_len": 50})
        async with started(TaskLauncher(), TaskLauncher(hello=small), TaskLauncher(hello=short)) as gateway:
            await asyncio.sleep(1)
            assert gateway.info is not None
            assert (gateway.info.num_blocks, gateway.info.max_model_len) == (5, 50)

    run(main())


def test_blocks_keep_their_names_while_external_engines_come_and_go() -> None:
    async def main() -> None:
        foreign = msgspec.structs.replace(HELLO, fingerprint=FINGERPRINT)
        ours = msgspec.structs.replace(HELLO, fingerprint="ours", block_tokens=8, num_blocks=20)
        launchers = [TaskLauncher(hello=hello) for hello in (foreign, ours, foreign)]
        async with started(*launchers, router=CacheAware(random.Random(1))) as gateway:
            await asyncio.sleep(1)
            assert gateway.block_naming == ("ours", 8)
            for launcher in (launchers[0], launchers[2]):
                launcher.instances[-1].kill()
                await asyncio.sleep(5)
                assert gateway.block_naming == ("ours", 8)
            await gateway.remove_instance(1)
            assert gateway.block_naming == (FINGERPRINT, 16)

    run(main())


def test_limits_are_those_of_the_instances_that_are_there() -> None:
    async def main() -> None:
        small = msgspec.structs.replace(HELLO, num_blocks=5, max_model_len=50, model="small")
        launchers = [TaskLauncher(hello=small), TaskLauncher()]
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)

            def limits() -> tuple[str, int, int]:
                assert gateway.info is not None
                return gateway.info.model, gateway.info.num_blocks, gateway.info.max_model_len

            assert limits() == ("small", 5, 50)
            launchers[0].start_s = 10.0
            launchers[0].instances[-1].kill()
            await asyncio.sleep(5)
            assert limits() == ("", 10, 200)
            await asyncio.sleep(10)
            assert limits() == ("small", 5, 50), "it is back"
            await gateway.remove_instance(0)
            assert limits() == ("", 10, 200)
            launchers[1].start_s = 10.0
            launchers[1].instances[-1].kill()
            await asyncio.sleep(5)
            assert limits() == ("", 10, 200), "of the last one, while nobody is there"
            stream = gateway.generate(make_request(max_tokens=60, ignore_eos=True))
            assert_complete(stream, await read(stream))

    run(main())


@pytest.mark.parametrize(
    "sizes", [[(40, 16), (20, 32)], [(20, 32), (40, 16)], [(30, 32), (41, 16)], [(41, 16), (30, 32)]]
)
def test_the_smallest_is_the_one_that_holds_the_fewest_tokens(sizes: list[tuple[int, int]]) -> None:
    """Whatever the sizes of its blocks."""

    async def main() -> None:
        hellos = [
            msgspec.structs.replace(HELLO, max_model_len=10_000, num_blocks=blocks, block_tokens=tokens)
            for blocks, tokens in sizes
        ]
        async with started(*(TaskLauncher(hello=hello) for hello in hellos)) as gateway:
            await asyncio.sleep(1)
            stream = gateway.generate(make_request("fits", max_tokens=638, ignore_eos=True))
            with pytest.raises(InvalidRequest, match="KV blocks"):
                gateway.generate(make_request("too long", max_tokens=656))
            assert_complete(stream, await read(stream))

    run(main())


# --- routing ---


def test_requests_are_spread_and_decisions_can_be_logged() -> None:
    async def main() -> None:
        routed: list[tuple[str, int, int]] = []
        launchers = make_launchers(3)
        async with started(
            *launchers, router=RoundRobin(), on_route=lambda *decision: routed.append(decision)
        ) as gateway:
            await asyncio.sleep(1)
            streams = [gateway.generate(make_request(str(i), max_tokens=50, ignore_eos=True)) for i in range(6)]
            assert routed == [(str(i), 0, i % 3) for i in range(6)]
            launchers[1].instances[0].kill()
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)
            assert [decision[:2] for decision in routed[6:]] == [("1", 1), ("4", 1)]
            assert {slot for _, _, slot in routed[6:]} == {0, 2}

    run(main())


def test_the_outputs_of_one_prompt_stay_together() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        async with started(*launchers, router=RoundRobin()) as gateway:
            await asyncio.sleep(1)
            first = make_request("a", max_tokens=100, ignore_eos=True)
            streams = [gateway.generate(first.choice(i, 1)) for i in range(5)]
            assert {place_of(gateway, stream) for stream in streams} == {0}
            launchers[0].instances[0].kill()
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)

    run(main())


def test_loads_are_added_up() -> None:
    async def main() -> None:
        async with started(*make_launchers(2)) as gateway:
            await asyncio.sleep(1)
            streams = [gateway.generate(make_request(str(i), max_tokens=150, ignore_eos=True)) for i in range(4)]
            await asyncio.sleep(0.6)
            assert [load.running for load in gateway.loads] == [2, 2]
            assert gateway.load.running == 4
            await asyncio.gather(*map(read, streams))
            await asyncio.sleep(1.1)
            assert gateway.load.running == 0
            assert gateway.load.steps == gateway.totals.steps == sum(load.steps for load in gateway.loads) > 100

    run(main())


def test_every_counter_is_added_up() -> None:
    now = {"running", "waiting", "kv_usage", "kv_cached", "blocked", "sequence", "progress"}  # state, not counted
    now |= {"lacking", "decoding", "context", "oldest_wait_s", "leases", "step_times", "role", "term", "grade"}
    now |= {"cache_sequence", "tiers"}  # the latter tested beside its own parts
    counters = [name for name in EngineLoad.__struct_fields__ if name not in now]
    first = EngineLoad(**{name: 10 + place for place, name in enumerate(counters)})
    second = EngineLoad(**{name: 100 * place for place, name in enumerate(counters)}, running=1, blocked=2)
    expected = EngineLoad(**{name: 10 + 101 * place for place, name in enumerate(counters)})
    assert add_counters(first, second) == expected


def test_an_instance_whose_reports_stay_away_gets_nothing_new() -> None:
    async def main() -> None:
        launchers = make_launchers(2)
        async with started(*launchers, router=RoundRobin()) as gateway:
            await asyncio.sleep(1)
            launchers[0].faults.hung = True
            await asyncio.sleep(10)
            streams = [gateway.generate(make_request(str(i))) for i in range(4)]
            assert [place_of(gateway, stream) for stream in streams] == [1] * 4
            launchers[1].instances[0].kill()  # now the other one is better than none
            await asyncio.sleep(0.01)
            assert [place_of(gateway, stream) for stream in streams] == [0] * 4
            launchers[0].faults.hung = False
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)

    run(main())


# --- deaths ---


def test_a_death_moves_its_requests_at_once_and_harms_no_other() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        for launcher in launchers:
            launcher.start_s = 1.0
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            streams = [gateway.generate(make_request(str(i), max_tokens=100, ignore_eos=True)) for i in range(9)]
            await asyncio.sleep(0.1)
            victims = {id(stream) for stream in streams if place_of(gateway, stream) == 1}
            launchers[1].start_s = 100.0
            launchers[1].instances[0].kill()
            await asyncio.sleep(0.001)
            assert {place_of(gateway, stream) for stream in streams} == {0, 2}
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)
                assert stream.attempt == (id(stream) in victims)
            assert gateway.restarts == 1

    run(main())


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("poison", [POISON, LATE_POISON])
@pytest.mark.parametrize("seed", range(4))
def test_only_the_killers_end_with_an_error(count: int, poison: int, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        launchers = make_launchers(count)
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            requests = [make_request(f"a{i}", [i + 1], max_tokens=rng.randint(1, 60)) for i in range(30)]
            requests += [make_request(f"p{i}", [poison, i], max_tokens=50) for i in range(3)]
            rng.shuffle(requests)
            reads: list[tuple[RequestStream, asyncio.Task[list]]] = []  # type: ignore[type-arg]
            for request in requests:
                stream = gateway.generate(request)
                reads.append((stream, asyncio.create_task(read(stream))))
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.03)))
                gateway.check()
            for stream, reading in reads:
                deltas = await reading
                if stream.request.request_id.startswith("p"):
                    assert deltas[-1].finish_reason == "error"
                    assert "after 3 attempts" in (deltas[-1].error or "")
                else:
                    assert_complete(stream, deltas)
            assert gateway.ended == {End.COMPLETED: 30, End.ERROR: 3, End.ABORT: 0}
            assert gateway.restarts <= 9
            assert gateway.healthy

    run(main())


def test_while_a_suspect_is_tried_the_others_go_elsewhere() -> None:
    """The probe waits until its slot is clean, then shares it with trusted requests only."""

    async def main() -> None:
        launchers = make_launchers(3)
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            poison = gateway.generate(make_request("poison", [POISON], max_tokens=9))
            reading = asyncio.create_task(read(poison))
            streams = []
            for i in range(300):
                streams.append(gateway.generate(make_request(str(i), [i + 1], max_tokens=40)))
                await asyncio.sleep(0.002)
                gateway.check()
            assert (await reading)[-1].finish_reason == "error"
            for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
                assert_complete(stream, deltas)
                assert stream.strikes < 3

    run(main())


def test_the_probe_waits_for_trusted_company_and_the_others_for_the_probe() -> None:
    async def main() -> None:
        launchers = make_launchers(2)
        async with started(*launchers, max_attempts=2, router=RoundRobin()) as gateway:
            await asyncio.sleep(1)
            for launcher in launchers:
                launcher.faults.stuck = True
            suspect, beside = (gateway.generate(make_request(name, max_tokens=150, ignore_eos=True)) for name in "ab")
            launchers[0].start_s = 100.0
            launchers[0].instances[0].kill()
            await asyncio.sleep(1)
            new = gateway.generate(make_request("c", max_tokens=150, ignore_eos=True))
            await asyncio.sleep(1)
            assert (suspect.strikes, beside.trusted) == (1, False)
            assert [submit.request.request_id for submit in launchers[1].scripts[0].submits] == ["b"]
            launchers[1].faults.stuck = False
            await asyncio.sleep(1)
            assert [submit.request.request_id for submit in launchers[1].scripts[0].submits] == ["b", "a", "c"]
            for stream, deltas in zip(
                (suspect, beside, new), await asyncio.gather(*map(read, (suspect, beside, new))), strict=True
            ):
                assert_complete(stream, deltas)

    run(main())


def test_a_slot_that_kills_every_request_is_given_up_and_none_of_them_is_blamed() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        launchers[1].faults.fragile = True
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            streams, reads = [], []
            for i in range(1000):
                streams.append(gateway.generate(make_request(str(i), [i % 600 + 1], max_tokens=40)))
                reads.append(asyncio.create_task(read(streams[-1])))
                await asyncio.sleep(0.1)
                gateway.check()
            for stream, deltas in zip(streams, await asyncio.gather(*reads), strict=True):
                assert_complete(stream, deltas)
            assert [slot.gave_up for slot in gateway._slots] == [False, True, False]
            assert len(launchers[1].launched_at) < 12

    run(main())


def test_it_gives_up_when_the_last_slot_has() -> None:
    async def main() -> None:
        launchers = make_launchers(2)
        async with started(*launchers, max_restarts=2) as gateway:
            await asyncio.sleep(1)
            for launcher in launchers:
                launcher.failures = ["failed"] * 9
            launchers[0].instances[0].kill()
            await asyncio.sleep(60)
            assert gateway.healthy
            stream = gateway.generate(make_request(max_tokens=100, ignore_eos=True))
            await anext(stream)
            launchers[1].instances[0].kill()
            last = (await read(stream))[-1]
            assert "out of memory" in (last.error or "")
            assert not gateway.healthy
            with pytest.raises(Unavailable, match="out of memory"):
                gateway.generate(make_request())

    run(main())


@pytest.mark.parametrize("when", [0.0, 0.1, 0.3, 0.55])
def test_close_during_restarts(when: float) -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        async with started(*launchers) as gateway:
            await asyncio.sleep(1)
            streams = [gateway.generate(make_request(str(i), max_tokens=150, ignore_eos=True)) for i in range(3)]
            for launcher in launchers[:2]:
                launcher.instances[0].kill()
            await asyncio.sleep(when)
            await gateway.close()
            for stream in streams:
                assert (await read(stream))[-1].finish_reason == "abort"
            assert not any_running(launchers)

    run(main())


def test_drain_lets_every_instance_finish() -> None:
    async def main() -> None:
        launchers = make_launchers(3)
        gateway = make_gateway(*launchers)
        await gateway.start()
        await asyncio.sleep(1)
        streams = [gateway.generate(make_request(str(i), max_tokens=100)) for i in range(9)]
        draining = asyncio.create_task(gateway.drain(30.0))
        await asyncio.sleep(0.05)
        launchers[2].instances[0].kill()
        for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
            assert_complete(stream, deltas)
        await draining
        assert [launcher.scripts[0].draining for launcher in launchers[:2]] == [True, True]
        assert not any_running(launchers)
        gateway.check()

    run(main())


def test_being_moved_from_an_instance_that_leaves_is_no_strike() -> None:
    async def main() -> None:
        leaving, staying = make_launchers(2)
        async with started(leaving, staying, router=RoundRobin()) as gateway:
            await asyncio.sleep(5)
            leaving.faults.stuck = True
            stream = gateway.generate(make_request("r", max_tokens=20, ignore_eos=True))
            assert place_of(gateway, stream) == 0
            await gateway.remove_instance(0, timeout=1.0)
            assert stream.attempts == 2
            assert stream.strikes == 0
            assert_complete(stream, await read(stream))

    run(main())
