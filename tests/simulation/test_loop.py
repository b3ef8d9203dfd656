"""The loop of virtual time: jumps, order, and what it refuses."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.simulation.loop import Deadlock, Livelock, run


def test_hours_pass_at_once_and_to_the_instant() -> None:
    async def main() -> float:
        await asyncio.sleep(3600 * 24 * 365)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main()) == 3600 * 24 * 365
    assert time.perf_counter() - began < 1.0


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0]), max_size=30))
def test_timers_run_by_time_and_then_in_the_order_they_were_set(delays: list[float]) -> None:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for index, delay in enumerate(delays):
            loop.call_later(delay, ran.append, index)
        await asyncio.sleep(2.0)

    run(main())
    assert ran == sorted(range(len(delays)), key=lambda index: (delays[index], index))


def test_cancelled_timers_neither_run_nor_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1e6, pytest.fail, "a cancelled timer ran").cancel()
            await asyncio.sleep(0.001)
        return len(loop._scheduled)  # type: ignore[attr-defined]

    assert run(main()) < 500


def test_timeouts_and_cancellation_work_as_on_any_loop() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(100)
        task = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return asyncio.get_running_loop().time()

    assert run(main()) == 3.5


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(main())


def test_time_that_does_not_pass_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm.simulation.loop.MAX_TURNS_WITHOUT_TIME", 1000)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(1.0)

    with pytest.raises(Livelock):
        run(main())


def test_nothing_outside_the_loop_can_be_reached() -> None:
    async def refused() -> list[str]:
        loop = asyncio.get_running_loop()
        attempts = [
            lambda: asyncio.open_connection("127.0.0.1", 80),
            lambda: asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0),
            lambda: asyncio.create_subprocess_exec("true"),
            lambda: asyncio.to_thread(time.time),
            lambda: loop.getaddrinfo("localhost", 80),
        ]
        messages = []
        for attempt in attempts:
            with pytest.raises(RuntimeError, match="virtual time has no sockets") as raised:
                await attempt()  # type: ignore[operator]
            messages.append(str(raised.value))
        return messages

    assert len(run(refused())) == 5


def test_tasks_that_are_left_over_are_named() -> None:
    async def main() -> None:
        asyncio.get_running_loop().leftover = asyncio.create_task(  # type: ignore[attr-defined]
            asyncio.sleep(1), name="forgotten"
        )

    with pytest.raises(RuntimeError, match="forgotten"):
        run(main())


def test_an_exception_that_nobody_sees_is_not_lost() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(2.0)

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(main())
