"""Gateway.clear_cache in virtual time: what each instance answers, and what is made of those that do not."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import read, started
from support.lossy_link import Weather
from support.scripted_instance import Faults, TaskLauncher, make_request
from support.virtual_time import run

from kllm.cluster.cache_clearing import ClearedInstance
from kllm.cluster.gateway import Gateway
from kllm.cluster.launchers.launcher import VisitingLauncher
from kllm.messages import CacheCleared, ClearCache, EngineLoad, Message
from kllm.telemetry.tier_counts import TierCounts

DONE = [ClearedInstance(0, True), ClearedInstance(1, True)]


def two(*, store_errors: tuple[str | None, str | None] = (None, None)) -> list[TaskLauncher]:
    return [TaskLauncher(Faults(store_error=error)) for error in store_errors]


async def ready(gateway: Gateway) -> None:
    await asyncio.sleep(1.0)
    assert all(slot.ready for slot in gateway._slots)


@pytest.mark.parametrize("store", [False, True])
def test_every_instance_is_asked_once(store: bool) -> None:
    async def main() -> None:
        launchers = two()
        async with started(*launchers) as gateway:
            await ready(gateway)
            assert await gateway.clear_cache(store) == DONE
            await asyncio.sleep(5)
            for launcher in launchers:
                [asked] = [m for m in launcher.scripts[0].heard if isinstance(m, ClearCache)]
                assert asked.store == store

    run(main())


def test_what_requests_use_stays_and_is_no_error() -> None:
    async def main() -> None:
        async with started(TaskLauncher()) as gateway:
            stream = gateway.generate(make_request(max_tokens=100, ignore_eos=True))
            await asyncio.sleep(0.1)
            assert await gateway.clear_cache() == [ClearedInstance(0, False)]
            await read(stream)
            assert await gateway.clear_cache() == [ClearedInstance(0, True)]

    run(main())


@pytest.mark.parametrize("kind", [ClearCache, CacheCleared])
def test_lost_questions_and_answers_are_repeated(kind: type[Message]) -> None:
    async def main() -> None:
        lost = 0

        def drop(message: Message) -> bool:
            nonlocal lost
            lost += isinstance(message, kind)
            return isinstance(message, kind) and lost <= 3

        async with started(TaskLauncher(weather=Weather(drop=drop))) as gateway:
            before = asyncio.get_running_loop().time()
            assert await gateway.clear_cache() == [ClearedInstance(0, True)]
            assert asyncio.get_running_loop().time() - before == pytest.approx(3.0, abs=0.1)

    run(main())


def test_bad_weather() -> None:
    """Answers that come twice, late, or to an older question do no harm."""

    async def main() -> None:
        launchers = [TaskLauncher(weather=Weather(lose=0.3, repeat=0.5, late=0.5, delay_s=3.0)) for _ in range(2)]
        async with started(*launchers) as gateway:
            await asyncio.sleep(10.0)
            for _ in range(20):
                assert await gateway.clear_cache(True) == DONE

    run(main())


def test_one_that_does_not_answer_is_told_after_the_limit() -> None:
    async def main() -> None:
        launchers = two()
        async with started(*launchers) as gateway:
            await ready(gateway)
            launchers[1].faults.hung = True
            before = asyncio.get_running_loop().time()
            answers = await gateway.clear_cache(timeout=7.0)
            assert asyncio.get_running_loop().time() - before == pytest.approx(7.0)
            assert answers == [DONE[0], ClearedInstance(1, False, "the instance did not answer in 7 s")]

    run(main())


def test_one_that_dies_or_starts_has_nothing_in_memory() -> None:
    async def main() -> None:
        launchers = two()
        async with started(*launchers) as gateway:
            await ready(gateway)
            launchers[1].faults.hung = True
            launchers[1].start_s = 60.0
            asked = asyncio.ensure_future(gateway.clear_cache(True))
            await asyncio.sleep(3.0)
            assert not asked.done()
            launchers[1].instances[0].kill()
            assert await asked == DONE
            launchers[1].faults.hung = False
            await asyncio.sleep(10)
            assert not gateway._slots[1].ready
            assert await gateway.clear_cache() == await gateway.clear_cache(True) == DONE

    run(main())


def test_one_that_becomes_ready_meanwhile_may_have_read_the_store() -> None:
    async def main() -> None:
        launchers = two()
        launchers[1].start_s = 10.0
        async with started(*launchers) as gateway:
            await asyncio.sleep(1.0)
            launchers[0].faults.hung = True
            asked = asyncio.ensure_future(gateway.clear_cache(True))
            await asyncio.sleep(15.0)
            launchers[0].faults.hung = False
            message = "the instance became ready while the store was being cleared"
            assert await asked == [DONE[0], ClearedInstance(1, False, message)]
            assert await gateway.clear_cache(True) == DONE

    run(main())


def test_a_store_that_nobody_could_clear_is_not_cleared() -> None:
    async def main() -> None:
        launchers = two(store_errors=("read-only", "read-only"))
        async with started(*launchers) as gateway:
            await ready(gateway)
            failed = [ClearedInstance(index, False, "read-only") for index in range(2)]
            assert await gateway.clear_cache(True) == failed
            assert await gateway.clear_cache(False) == DONE
            launchers[1].start_s = 60.0
            launchers[1].instances[0].kill()
            await asyncio.sleep(10)
            nobody = ClearedInstance(1, False, "no instance was ready that could clear the store")
            assert await gateway.clear_cache(True) == [failed[0], nobody]

    run(main())


class VisitedTasks(TaskLauncher, VisitingLauncher):
    """They count as started elsewhere."""

    address = "tcp://10.0.0.5:7001"


def test_one_that_was_started_elsewhere_may_still_have_what_it_had() -> None:
    async def main() -> None:
        launchers = [TaskLauncher(), VisitedTasks()]
        async with started(*launchers) as gateway:
            await ready(gateway)
            assert await gateway.clear_cache() == DONE
            unreached = [DONE[0], ClearedInstance(1, False, "it cannot be reached")]
            launchers[1].faults.hung = True
            launchers[1].failures = ["launch"] * 1000
            asked = asyncio.ensure_future(gateway.clear_cache())
            await asyncio.sleep(3.0)
            launchers[1].instances[0].kill()
            assert await asked == unreached
            assert gateway.slots[1].state == "absent"
            assert await gateway.clear_cache() == await gateway.clear_cache(True) == unreached
            await gateway.remove_instance(1)
            assert await gateway.clear_cache() == DONE, "it is not ours any more"

    run(main())


def test_a_gateway_that_closes_answers() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            launcher.faults.hung = True
            asked = asyncio.ensure_future(gateway.clear_cache(True))
            await asyncio.sleep(1.0)
            await gateway.close()
            assert not (await asked)[0].complete

    run(main())


def test_counters_of_tiers_survive_their_instance() -> None:
    async def main() -> None:
        launcher = TaskLauncher()
        async with started(launcher) as gateway:
            assert gateway.totals.tiers is None
            counts = TierCounts(saved=5, bytes_saved=500, l2_blocks=7, l2_capacity=8, store_down=1)
            load = EngineLoad(l2_hits=3, l3_hits=2, wasted=1, sequence=1000, tiers=counts)
            for incarnation in range(1, 4):
                launcher.scripts[-1].link.send(load)
                await asyncio.sleep(0.1)
                assert gateway.loads[0].tiers == counts
                launcher.instances[-1].kill()
                await asyncio.sleep(10.0)
                totals = gateway.totals
                assert (totals.l2_hits, totals.l3_hits, totals.wasted) == (
                    3 * incarnation,
                    2 * incarnation,
                    incarnation,
                )
                assert totals.tiers == TierCounts(saved=5 * incarnation, bytes_saved=500 * incarnation)

    run(main())
