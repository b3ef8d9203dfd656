"""Engines that take no more requests now, or fail them, behind a gateway in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from support.foreign_engine import continuation
from support.gateways import read
from support.scripted_instance import make_request
from support.virtual_engine import VirtualEngine, gateway_over
from support.virtual_time import run

from kllm.cluster.external.in_flight import BUSY_PATIENCE_S
from kllm.cluster.gateway import MAX_REFUSALS, RequestStream, Unavailable
from kllm.cluster.request_stream import End
from kllm.request import Request

TOKENS = 12
WHOLE = continuation([1, 2, 3], TOKENS)


def wanted(name: str = "r", tokens: int = TOKENS) -> Request:
    return make_request(name, max_tokens=tokens)


async def tokens_of(stream: RequestStream) -> list[int]:
    deltas = await read(stream)
    assert deltas[-1].finish_reason == "length", deltas[-1]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("retry_after_s", [0.0, 1.0, 5.0, 600.0])
def test_it_is_asked_for_as_long_as_the_patience_lasts(monkeypatch: pytest.MonkeyPatch, retry_after_s: float) -> None:
    """Whatever Retry-After says: with kLLM's own 5 s too it is asked again once before it is given up."""

    async def main() -> None:
        engine = VirtualEngine()
        async with gateway_over(monkeypatch, engine) as gateway:
            begun = asyncio.get_running_loop().time()
            engine.busy = retry_after_s
            stream = gateway.generate(wanted())
            asyncio.get_running_loop().call_later(4.9, setattr, engine, "busy", None)
            assert await tokens_of(stream) == WHOLE
            assert stream.attempt == 0
            assert len(engine.asked) >= 2
            assert asyncio.get_running_loop().time() - begun <= BUSY_PATIENCE_S + 0.01

    run(main())


def test_being_busy_is_no_failure_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = VirtualEngine()
        async with gateway_over(monkeypatch, engine) as gateway:
            engine.busy = 5.0
            stream = gateway.generate(wanted())
            asyncio.get_running_loop().call_later(22.0, setattr, engine, "busy", None)
            assert await tokens_of(stream) == WHOLE
            assert (stream.strikes, stream.losses) == (0, 0)

    run(main())


def test_when_all_stay_busy_the_client_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engines = [VirtualEngine("http://a"), VirtualEngine("http://b")]
        async with gateway_over(monkeypatch, *engines) as gateway:
            begun = asyncio.get_running_loop().time()
            for engine in engines:
                engine.busy = 5.0
            stream = gateway.generate(wanted())
            with pytest.raises(Unavailable) as raised:
                await read(stream)
            assert raised.value.retry_after_s == 5
            assert asyncio.get_running_loop().time() - begun == pytest.approx(MAX_REFUSALS * BUSY_PATIENCE_S, abs=0.1)
            assert [len(engine.asked) for engine in engines] == [MAX_REFUSALS, MAX_REFUSALS], (
                "in turns, twice each time"
            )
            assert (gateway.in_flight, gateway.ended[End.ERROR]) == (0, 1)
            assert await read(stream) == []

    run(main())


def test_what_a_refuser_gives_back_goes_to_one_that_is_well_though_it_has_more_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        refusing, well = VirtualEngine("http://a"), VirtualEngine("http://b")
        well.step_s = 0.1
        async with gateway_over(monkeypatch, refusing, well) as gateway:
            refusing.busy = 10.0
            gateway.slots[0].resting = True
            long = [gateway.generate(wanted(f"long{i}", tokens=1000)) for i in range(4)]
            gateway.slots[0].resting = False
            stream = gateway.generate(wanted())
            assert list(gateway.slots[0].assigned) == ["r"], "the least loaded"
            assert await tokens_of(stream) == WHOLE
            assert stream.attempt == 1
            for each in long:
                await each.aclose()

    run(main())


def test_what_one_engine_fails_goes_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that fails at once is always the least loaded."""

    async def main() -> None:
        failing, well = VirtualEngine("http://a"), VirtualEngine("http://b")
        well.step_s = 0.1
        async with gateway_over(monkeypatch, failing, well) as gateway:
            failing.failing = True
            streams = [gateway.generate(wanted(f"r{i}")) for i in range(8)]
            for stream in streams:
                assert await tokens_of(stream) == WHOLE
                assert stream.attempt <= 1

    run(main())
