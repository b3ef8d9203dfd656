"""Work that goes on while its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kllm.server.errors import ClientDisconnected
from kllm.server.reply import until_disconnect


class Client:
    """Leaves when `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Waits to be told to end; notes that it was cancelled, and that it could clean up."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.cleaned_up = False

    async def run(self) -> str:
        try:
            await self.may_end.wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def started(client: Client, work: Work) -> asyncio.Task[str]:
    task = asyncio.create_task(until_disconnect(client.receive, work.run()))
    await turns()
    assert not task.done()
    return task


async def its_result() -> None:
    client, work = Client(), Work()
    task = await started(client, work)
    work.may_end.set()
    assert await task == "done"
    assert task.cancelling() == 0


async def work_that_needs_no_turn_of_its_own() -> None:
    async def nothing() -> int:
        return 7

    assert await until_disconnect(Client().receive, nothing()) == 7
    await turns()  # no cancellation comes after it
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def its_error() -> None:
    async def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await until_disconnect(Client().receive, broken())
    await turns()


async def the_client_leaves() -> None:
    client, work = Client(), Work()
    task = await started(client, work)
    client.left.set()
    with pytest.raises(ClientDisconnected):
        await task
    assert work.cleaned_up


async def the_client_has_left_before() -> None:
    client, work = Client(), Work()
    client.left.set()
    with pytest.raises(ClientDisconnected):
        await until_disconnect(client.receive, work.run())
    await turns()


async def the_client_leaves_as_the_work_ends() -> None:
    client, work = Client(), Work()
    task = await started(client, work)
    work.may_end.set()
    await asyncio.sleep(0)
    client.left.set()
    [result] = await asyncio.gather(task, return_exceptions=True)
    assert result == "done" or isinstance(result, ClientDisconnected)
    await turns()
    assert work.cleaned_up
    assert task.cancelling() == 0


async def cancelled_from_outside() -> None:
    client, work = Client(), Work()
    task = await started(client, work)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cleaned_up


async def cancelled_from_outside_as_the_work_ends() -> None:
    client, work = Client(), Work()
    task = await started(client, work)
    work.may_end.set()
    await turns(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


SCENARIOS = [
    its_result,
    work_that_needs_no_turn_of_its_own,
    its_error,
    the_client_leaves,
    the_client_has_left_before,
    the_client_leaves_as_the_work_ends,
    cancelled_from_outside,
    cancelled_from_outside_as_the_work_ends,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_until_disconnect(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())
