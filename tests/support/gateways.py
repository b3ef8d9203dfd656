"""Gateways over scripted instances, and what their streams must be like."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from support.scripted_instance import TaskLauncher, reference

from kllm.cluster.gateway import Gateway, RequestStream
from kllm.request import Delta


def make_gateway(*launchers: TaskLauncher, **options: Any) -> Gateway:
    return Gateway(launchers, rng=random.Random(1), **options)


@contextlib.asynccontextmanager
async def started(*launchers: TaskLauncher, **options: Any) -> AsyncIterator[Gateway]:
    """Ready; on leaving its books must balance, and nothing may be left running."""
    gateway = make_gateway(*launchers, **options)
    await gateway.start()
    try:
        yield gateway
    finally:
        gateway.check()
        await gateway.close()
        gateway.check()
        assert gateway.in_flight == 0
        assert not any_running(launchers)


def any_running(launchers: Sequence[TaskLauncher]) -> bool:
    return any(launcher.running for launcher in launchers)


async def read(stream: RequestStream) -> list[Delta]:
    return [delta async for delta in stream]


def assert_complete(stream: RequestStream, deltas: list[Delta]) -> None:
    tokens, reason = reference(stream.request)
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
    index = 0
    for delta in deltas:
        assert delta.index == index
        index += len(delta.token_ids)
