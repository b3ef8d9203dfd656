"""The gateway over Prefill and Decode Pools of scripted instances in virtual time: a request is prefilled at one, goes
on at another, and survives whatever happens to either."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest
from support.gateways import assert_complete, read, started
from support.lossy_link import Weather
from support.scripted_instance import HELLO, Faults, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.gateway import Gateway
from kllm.cluster.pool_routing import GlobalPools, PoolSettings
from kllm.messages import Release, Role, Submit
from kllm.request import StructuredOutputs


def launchers(*roles: Role, transfers: bool = True, **options: object) -> list[TaskLauncher]:
    made = []
    for index, role in enumerate(roles):
        hello = msgspec.structs.replace(
            HELLO, instance_id=f"i{index}", incarnation=f"n{index}", role=role, transfers=transfers
        )
        made.append(TaskLauncher(hello=hello, **options))  # type: ignore[arg-type]
    return made


def always_apart() -> GlobalPools:
    """However short a prompt is."""
    return GlobalPools(random.Random(1), PoolSettings(conditional=False))


def submits(launcher: TaskLauncher) -> list[Submit]:
    return [submit for script in launcher.scripts for submit in script.submits]


async def serve(gateway: Gateway, count: int, prefix: str = "r", **params: object) -> None:
    """Requests all at once; each must come out whole."""
    streams = [
        gateway.generate(make_request(f"{prefix}{i}", [i + 1, 2, 3], max_tokens=40, ignore_eos=True, **params))
        for i in range(count)
    ]
    for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
        assert_complete(stream, deltas)


def test_prefilled_at_one_and_decoded_at_another() -> None:
    async def main() -> None:
        pools = launchers("prefill", "prefill", "decode", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            await serve(gateway, 20)
            p, d = pools[:2], pools[2:]
            first = [submit for launcher in p for submit in submits(launcher)]
            second = [submit for launcher in d for submit in submits(launcher)]
            assert len(first) == len(second) == 20
            assert all(submit.prefill_only and not submit.outputs and submit.kv is None for submit in first)
            assert all(not submit.prefill_only and len(submit.outputs) == 1 for submit in second)
            assert all(submit.attempt == 1 and submit.kv is not None for submit in second)
            assert all(submits(launcher) for launcher in pools), "both of each pool are used"
            await asyncio.sleep(2)
            assert not any(script.leases for launcher in pools for script in launcher.scripts), "all were released"

    run(main())


def test_a_request_of_one_token_is_not_separated() -> None:
    async def main() -> None:
        pools = launchers("prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            stream = gateway.generate(make_request(max_tokens=1, ignore_eos=True))
            assert_complete(stream, await read(stream))
            assert not submits(pools[1])

    run(main())


@pytest.mark.parametrize("roles", [("prefill", "prefill"), ("decode", "decode")])
def test_a_pool_that_is_empty_is_stood_in_for(roles: tuple[Role, ...]) -> None:
    async def main() -> None:
        pools = launchers(*roles)
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            await serve(gateway, 10)
            assert not any(submit.prefill_only for launcher in pools for submit in submits(launcher))

    run(main())


def test_not_separated_where_kv_cannot_move() -> None:
    async def main() -> None:
        pools = launchers("prefill", "decode", transfers=False)
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            await serve(gateway, 10)
            assert not any(submit.prefill_only for launcher in pools for submit in submits(launcher))

    run(main())


def beside_pools(*roles: Role) -> list[TaskLauncher]:
    """Pools, and behind them one that can neither take KV nor resume, as an external engine."""
    made = launchers(*roles, "both")
    made[-1].hello = msgspec.structs.replace(made[-1].hello, transfers=False, resumes=False)
    return made


@pytest.mark.parametrize("structured", [None, StructuredOutputs(json_object=True)])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill",)])
def test_what_is_prefilled_goes_on_where_its_kv_can_be_taken(
    roles: tuple[Role, ...], structured: StructuredOutputs | None
) -> None:
    """Elsewhere the prompt would be computed again, and a structured output could not go on at all."""

    async def main() -> None:
        pools = beside_pools("prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            gateway.slots[2].resting = True  # all are prefilled in the pool
            serving = asyncio.create_task(serve(gateway, 20, structured_outputs=structured))
            await asyncio.sleep(0.004)
            gateway.slots[2].resting = False
            if len(roles) == 1:
                pools[1].start_s = 60.0
                pools[1].instances[-1].kill()
            await serving
            begun = [submit for launcher in pools[:2] for submit in submits(launcher) if submit.kv is not None]
            assert begun
            assert not any(submit.outputs for submit in submits(pools[2]))

    run(main())


def test_what_is_handed_over_is_counted_in_blocks_of_the_holder() -> None:
    async def main() -> None:
        pools = launchers("decode", "prefill")
        pools[1].hello = msgspec.structs.replace(pools[1].hello, block_tokens=4, num_blocks=40)
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            pools[0].faults.stuck = True
            stream = gateway.generate(make_request(prompt=[1] * 40, max_tokens=40, ignore_eos=True))
            await asyncio.sleep(0.1)
            candidate = gateway.slots[0].candidate()
            assert (candidate.prefilling, candidate.pulling) == (41 - 4, 4)
            pools[0].faults.stuck = False
            assert_complete(stream, await read(stream))

    run(main())


def test_a_structured_output_that_has_begun_goes_to_one_that_resumes() -> None:
    async def main() -> None:
        three = beside_pools("both", "both")
        async with started(*three) as gateway:
            await asyncio.sleep(2)
            serving = asyncio.create_task(serve(gateway, 30, structured_outputs=StructuredOutputs(json_object=True)))
            await asyncio.sleep(0.05)
            three[0].start_s = 60.0
            three[0].instances[-1].kill()
            await serving
            assert submits(three[2])
            assert not any(submit.outputs for submit in submits(three[2]))

    run(main())


def test_a_follower_goes_where_its_leader_is_prefilled() -> None:
    async def main() -> None:
        pools = launchers("prefill", "prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            leader = make_request("a", max_tokens=20, ignore_eos=True, seed=1)
            follower = msgspec.structs.replace(make_request("b", max_tokens=20, ignore_eos=True, seed=2), leader="a")
            streams = [gateway.generate(request) for request in (leader, follower)]
            for stream in streams:
                assert_complete(stream, await read(stream))
            assert sorted(len(submits(launcher)) for launcher in pools[:2]) == [0, 2]

    run(main())


@pytest.mark.parametrize("moment", [0.003, 0.015, 0.03, 0.1])
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_the_death_of_one_of_either_pool(victim: int, moment: float) -> None:
    async def main() -> None:
        pools = launchers("prefill", "prefill", "decode", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            serving = asyncio.create_task(serve(gateway, 40))
            await asyncio.sleep(moment)
            pools[victim].instances[-1].kill()
            await serving
            await asyncio.sleep(5)
            assert gateway.restarts == 1

    run(main())


def test_the_death_of_a_whole_pool_and_of_the_holder_of_kv() -> None:
    async def main() -> None:
        pools = launchers("prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            serving = asyncio.create_task(serve(gateway, 20))
            await asyncio.sleep(0.015)
            pools[1].instances[-1].kill()  # everything is prefilled, and now decoded, at the other
            await asyncio.sleep(0.05)
            pools[0].instances[-1].kill()
            await serving

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_lost_repeated_late_messages_and_crashes(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        pools = launchers("prefill", "prefill", "decode", "decode", "both")
        for launcher in pools:
            launcher.faults = Faults(random.Random(rng.random()), repeat=0.1, skip=0.02, crash=0.005, late_finish=0.1)
            launcher.weather = Weather(random.Random(rng.random()), lose=0.03, repeat=0.03, late=0.03)
        patient = {"max_attempts": 30, "max_restarts": 1000, "silence_limit": 3.0}
        async with started(*pools, pools=always_apart(), **patient) as gateway:
            await asyncio.sleep(2)
            for batch in range(3):
                await serve(gateway, 25, f"b{batch}-")
                gateway.check()

    run(main())


def test_a_client_that_leaves_frees_what_is_held_for_it() -> None:
    async def main() -> None:
        pools = launchers("prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            pools[1].faults.stuck = True  # takes it and does not begin
            stream = gateway.generate(make_request(max_tokens=40, ignore_eos=True))
            await asyncio.sleep(0.5)
            assert pools[0].scripts[-1].leases
            await stream.aclose()
            await asyncio.sleep(0.5)
            assert not pools[0].scripts[-1].leases

    run(main())


def test_kv_that_comes_too_late_is_let_go() -> None:
    """The client leaves between the end of the prefill and the word of it."""

    async def main() -> None:
        pools = launchers("prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            stream = gateway.generate(make_request(max_tokens=40, ignore_eos=True))
            await stream.__anext__()
            await stream.aclose()
            await asyncio.sleep(2)
            assert not pools[0].scripts[-1].leases
            assert any(isinstance(message, Release) for message in pools[0].scripts[-1].heard)

    run(main())


def test_a_role_changes_when_what_runs_has_ended() -> None:
    async def main() -> None:
        pools = launchers("prefill", "prefill", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            serving = asyncio.create_task(serve(gateway, 30))
            await asyncio.sleep(0.03)
            assert await gateway.set_role(1, "decode")
            assert [slot.role for slot in gateway._slots] == ["prefill", "decode", "decode"]
            before = len(submits(pools[1]))
            await serving
            await serve(gateway, 30, "s")
            later = submits(pools[1])[before:]
            assert later
            assert not any(submit.prefill_only for submit in later)
            pools[1].instances[-1].kill()  # the role outlives the instance
            await asyncio.sleep(5)
            assert gateway._slots[1].role == "decode"

    run(main())


def test_the_higher_term_holds() -> None:
    """Two orders at once: the later one wins, whatever order they arrive in."""

    async def main() -> None:
        [one, two] = launchers("both", "both")
        async with started(one, two) as gateway:
            await asyncio.sleep(2)
            assert await gateway.set_role(0, "prefill")
            assert await gateway.set_role(0, "decode")
            script = one.scripts[-1]
            assert (script.role, script.term) == ("decode", 2)
            with pytest.raises(KeyError):
                await gateway.set_role(9, "both")

    run(main())


@pytest.mark.parametrize("later_s", [0.0, 1.6])
def test_of_orders_that_overlap_the_latest_holds(later_s: float) -> None:
    """Whether the first still waits, or was sent and is not reported yet."""

    async def main() -> None:
        [one, two] = launchers("both", "both")
        async with started(one, two) as gateway:
            await asyncio.sleep(2)
            streams = [gateway.generate(make_request(str(i), max_tokens=100, ignore_eos=True)) for i in range(2)]
            one.faults.stuck = True
            first = asyncio.create_task(gateway.set_role(0, "prefill", timeout=1.5))
            await asyncio.sleep(later_s)
            second = asyncio.create_task(gateway.set_role(0, "decode", timeout=4.0))
            await asyncio.sleep(3.0)
            assert gateway.slots[0].resting, "the second one still waits"
            one.faults.stuck = False
            assert await second
            assert await first == (later_s > 1.5)
            assert not gateway.slots[0].resting
            assert one.scripts[-1].role == "decode"
            for stream in streams:
                assert_complete(stream, await read(stream))

    run(main())


def test_roles_of_both_take_part_in_both_pools() -> None:
    async def main() -> None:
        pools = launchers("prefill", "both", "decode")
        async with started(*pools, pools=always_apart()) as gateway:
            await asyncio.sleep(2)
            await serve(gateway, 60)
            used = Counter(submit.prefill_only for submit in submits(pools[1]))
            assert used[False]
            assert not used[True], "what it prefills it keeps"

    run(main())
