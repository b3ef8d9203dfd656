"""External engines behind a gateway: whatever befalls an engine, every stream is whole. Real sockets, real time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from support import foreign_engine
from support.foreign_engine import MODEL, ForeignEngine, continuation, engines

from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.launcher import ExternalLauncher
from kllm.cluster.gateway import Gateway, RequestStream
from kllm.cluster.routing import RoundRobin
from kllm.messages import Abort, Deltas, Drain, Drained, EngineLoad, Failed, Hello, PrefillDone, SetRole, Submit, Up
from kllm.request import Delta, Request, SamplingParams

HANG_S = 60.0  # a limit on hangs, not on speed: the machine may be busy with other things
TOKENS = 12


def request(name: str = "r", *, tokens: int = TOKENS, prompt: Sequence[int] = (1, 2, 3), **params: Any) -> Request:
    params = {"max_tokens": tokens, **params}
    return Request(request_id=name, prompt_token_ids=list(prompt), params=SamplingParams(**params))


@contextlib.asynccontextmanager
async def gateway_over(*found: ForeignEngine, **options: Any) -> AsyncIterator[Gateway]:
    """Ready; its books balance on leaving."""
    launchers = [ExternalLauncher(ExternalEngine(url=engine.url, **options), vocab_size=1000) for engine in found]
    gateway = Gateway(launchers, rng=random.Random(1), router=RoundRobin())
    await gateway.start()
    try:
        await until(lambda: all(slot.ready for slot in gateway._slots))
        async with asyncio.timeout(HANG_S):
            yield gateway
        gateway.check()
    finally:
        await gateway.close()
        gateway.check()


async def tokens_of(stream: RequestStream) -> list[int]:
    """All of a stream that must end well."""
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason == "length", deltas[-1]
    return [token for delta in deltas for token in delta.token_ids]


async def error_of(stream: RequestStream) -> Delta:
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason == "error"
    return deltas[-1]


async def until(condition: Callable[[], bool]) -> None:
    await foreign_engine.until(condition, HANG_S)


WHOLE = continuation([1, 2, 3], TOKENS)


def completions(engine: ForeignEngine) -> list[dict[str, Any]]:
    """Without the one that every adapter tries at its start."""
    return [body for body in engine.bodies if body["prompt"] != [1]]


# -- what goes well --------------------------------------------------------------------------------------------


def test_a_stream() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine) as gateway:
            hello = gateway.info
            assert hello is not None
            assert (hello.model, hello.max_model_len, hello.vocab_size) == (MODEL, 2000, 1000)
            assert (hello.block_tokens, hello.num_blocks) == (4, 500)
            assert hello.operators == "vLLM 9.9 over HTTP"
            assert not hello.resumes
            deltas = [delta async for delta in gateway.generate(request())]
            assert [token for delta in deltas for token in delta.token_ids] == WHOLE
            assert deltas[0].timings is not None
            assert deltas[0].timings.prefill_s > 0

    asyncio.run(main())


def test_many_at_once_and_never_more_than_allowed() -> None:
    async def main() -> None:
        async with ForeignEngine(chunk_s=0.001) as engine, gateway_over(engine, max_requests=4) as gateway:
            prompts = [[1, 2, number] for number in range(40)]
            streams = [gateway.generate(request(f"r{n}", prompt=prompt)) for n, prompt in enumerate(prompts)]
            outputs = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert outputs == [continuation(prompt, TOKENS) for prompt in prompts]
            assert engine.most_running == 4

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_work() -> None:
    async def main() -> None:
        async with ForeignEngine(chunk_s=0.005) as engine, gateway_over(engine) as gateway:
            stream = gateway.generate(request(tokens=1000))
            await anext(stream)
            assert engine.running == 1
            await stream.aclose()
            await until(lambda: engine.running == 0)
            assert engine.left == 1

    asyncio.run(main())


def test_reports() -> None:
    """The engine's own figures and what we know ourselves."""

    async def main() -> None:
        async with ForeignEngine(chunk_s=0.005) as engine, gateway_over(engine) as gateway:
            stream = gateway.generate(request(tokens=1000))
            await anext(stream)
            await until(lambda: gateway.load.running == 1 and gateway.load.waiting == 3)
            load = gateway.loads[0]
            assert load.kv_usage == 0.25
            assert load.progress is not None
            assert load.progress["r"][1] > 1
            assert load.context > 3
            assert load.steps > 0
            await stream.aclose()
            await until(lambda: gateway.load.running == 0)

    asyncio.run(main())


# -- what goes wrong with one request --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "cut", "no done", "malformed", "no ids", "deluge", "404"])
def test_a_failed_request_is_tried_again_and_goes_on_where_it_was(fault: str) -> None:
    async def main() -> None:
        async with engines(2) as found, gateway_over(*found) as gateway:
            found[0].faults = [fault]
            assert await tokens_of(gateway.generate(request())) == WHOLE
            sent = [body for engine in found for body in completions(engine)]
            assert len(sent) == (1 if fault == "deluge" else 2)  # all that was wanted had come
            if fault in ("cut", "no done", "malformed"):  # two tokens came before
                assert sent[1]["prompt"] == [1, 2, 3, *WHOLE[:2]]
                assert sent[1]["max_tokens"] == TOKENS - 2
            assert gateway.restarts == 0

    asyncio.run(main())


def test_silence_is_a_failure_too() -> None:
    async def main() -> None:
        async with engines(2) as found, gateway_over(*found, read_timeout=0.5) as gateway:
            found[0].faults = ["hang"]
            assert await tokens_of(gateway.generate(request())) == WHOLE
            await until(lambda: found[0].running == 0)

    asyncio.run(main())


def test_a_busy_engine_is_asked_again() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine) as gateway:
            engine.faults = ["429", "503"]
            assert await tokens_of(gateway.generate(request())) == WHOLE
            assert len(completions(engine)) == 3

    asyncio.run(main())


def test_what_always_fails_ends_with_an_error() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine) as gateway:
            engine.faults = ["500"] * 10
            error = await error_of(gateway.generate(request()))
            assert error.error is not None
            assert "told to answer 500" in error.error
            assert not error.invalid
            assert len(completions(engine)) == 3
            engine.faults = []
            assert await tokens_of(gateway.generate(request("other"))) == WHOLE

    asyncio.run(main())


def test_a_wrong_request_is_the_clients_fault() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine) as gateway:
            engine.faults = ["400"]
            error = await error_of(gateway.generate(request()))
            assert (error.error, error.invalid) == ("told to answer 400", True)
            error = await error_of(gateway.generate(request("other", prompt_logprobs=1)))
            assert error.invalid
            assert len(completions(engine)) == 1

    asyncio.run(main())


# -- what goes wrong with an engine ----------------------------------------------------------------------------


def test_a_dying_engine_costs_no_token_and_comes_back() -> None:
    async def main() -> None:
        async with engines(2, chunk_s=0.005) as found, gateway_over(*found) as gateway:
            prompts = [[1, 2, number] for number in range(6)]
            streams = [gateway.generate(request(f"r{n}", prompt=prompt, tokens=40)) for n, prompt in enumerate(prompts)]
            outputs = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: all(len(stream.outputs) > 3 for stream in streams))
            await found[0].die()
            assert await asyncio.gather(*outputs) == [continuation(prompt, 40) for prompt in prompts]
            assert not gateway._slots[0].ready
            before = len(found[0].bodies)
            await found[0].open()
            await until(lambda: gateway._slots[0].ready)
            await asyncio.gather(*(tokens_of(gateway.generate(request(f"s{number}"))) for number in range(4)))
            assert len(found[0].bodies) > before + 1  # the trial, and its share

    asyncio.run(main())


def test_an_engine_that_says_it_is_not_well_gets_nothing_more() -> None:
    async def main() -> None:
        async with engines(2) as found, gateway_over(*found) as gateway:
            found[0].health = 503
            await until(lambda: not gateway._slots[0].ready)
            for number in range(3):
                assert await tokens_of(gateway.generate(request(f"r{number}"))) == WHOLE
            assert not completions(found[0])

    asyncio.run(main())


def test_an_engine_that_is_not_there_yet_is_waited_for() -> None:
    async def main() -> None:
        engine = ForeignEngine()
        await engine.open()
        await engine.die()
        phases: list[str] = []
        gateway = Gateway(
            [ExternalLauncher(ExternalEngine(url=engine.url))],
            rng=random.Random(1),
            on_starting=lambda _, starting: phases.append(starting.phase),
        )
        starting = asyncio.create_task(gateway.start())
        await until(lambda: bool(phases))
        assert "nobody answers" in phases[0]
        await engine.open()
        async with asyncio.timeout(HANG_S):
            await starting
        assert await tokens_of(gateway.generate(request())) == WHOLE
        await gateway.close()
        await engine.die()

    asyncio.run(main())


def _card(engine: ForeignEngine) -> None:
    del engine.card["max_model_len"]


def _no_ids(engine: ForeignEngine) -> None:
    engine.faults = ["no ids"]


def _refuses(engine: ForeignEngine) -> None:
    engine.faults = ["400"]


def _no_completions(engine: ForeignEngine) -> None:
    engine.faults = ["404"]


@pytest.mark.parametrize(
    ("spoil", "options", "why"),
    [
        (_no_ids, {}, "carry no token ids"),
        (_refuses, {}, "refuses a completion with token ids: told to answer 400"),
        (_no_completions, {}, "told to answer 404"),
        (_card, {}, "set max_model_len"),
        (lambda _: None, {"model": "other"}, "does not serve a model 'other'; it serves theirs"),
        (lambda _: None, {"block_size": 8}, "has KV blocks of 4 tokens, but block_size is 8"),
    ],
)
def test_engines_that_cannot_be_used(spoil: Callable[[ForeignEngine], None], options: dict[str, Any], why: str) -> None:
    """The operator is told, and the gateway tries again: the engine may be started anew, and better."""

    async def main() -> None:
        async with ForeignEngine() as engine:
            spoil(engine)
            launcher = ExternalLauncher(ExternalEngine(url=engine.url, **options))
            gateway = Gateway([launcher], rng=random.Random(1))
            starting = asyncio.create_task(gateway.start())
            await until(lambda: gateway._slots[0].trouble is not None)
            assert why in str(gateway._slots[0].trouble)
            assert not gateway.ready
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await gateway.close()

    asyncio.run(main())


def test_an_engine_without_metrics() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine:
            engine.metrics = None
            async with gateway_over(engine) as gateway:
                assert gateway.info is not None
                assert gateway.info.block_tokens == 16
                assert await tokens_of(gateway.generate(request())) == WHOLE

    asyncio.run(main())


# -- the key ---------------------------------------------------------------------------------------------------


def test_the_key_goes_to_the_engine_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("THEIR_KEY", "very-secret")
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine, api_key_env="THEIR_KEY") as gateway:
            engine.faults = ["500"]
            await tokens_of(gateway.generate(request()))
            assert all("authorization: bearer very-secret" in head.lower() for head in engine.heads)
            assert "very-secret" not in repr(gateway.info)

    asyncio.run(main())
    assert "very-secret" not in caplog.text


# -- as an instance --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def instance_of(engine: ForeignEngine) -> AsyncIterator[Any]:
    """An adapter that has said Hello, and nobody but the test at the other end of its link."""
    instance = await ExternalLauncher(ExternalEngine(url=engine.url)).launch()
    try:
        async with asyncio.timeout(HANG_S):
            while not isinstance(await instance.link.recv(), Hello):
                pass
            yield instance
    finally:
        await instance.stop(0)


async def heard(instance: Any, kind: type[Up]) -> Any:
    """The next message of this kind."""
    while not isinstance(message := await instance.link.recv(), kind):
        pass
    return message


def test_prefill_only() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, instance_of(engine) as instance:
            instance.link.send(Submit(request=request(), attempt=2, prefill_only=True))
            deltas = await heard(instance, Deltas)
            assert [(d.index, d.token_ids, d.finish_reason) for d in deltas.items] == [(0, WHOLE[:1], None)]
            done = await heard(instance, PrefillDone)
            assert (done.request_id, done.attempt, done.num_outputs, done.kv) == ("r", 2, 1, None)

    asyncio.run(main())


def test_late_and_repeated_messages_do_no_harm() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, instance_of(engine) as instance:
            link = instance.link
            link.send(Abort(request_ids=["aborted"], attempt=1))
            link.send(Submit(request=request("aborted"), attempt=1))
            link.send(Submit(request=request(), attempt=2))
            link.send(Submit(request=request(), attempt=2))
            link.send(Submit(request=request(), attempt=1))
            link.send(Abort(request_ids=["r"], attempt=1))
            items: list[Delta] = []
            while not items or items[-1].finish_reason is None:
                items += (await heard(instance, Deltas)).items
            assert [token for item in items for token in item.token_ids] == WHOLE
            assert {item.attempt for item in items} == {2}
            assert len(completions(engine)) == 1

    asyncio.run(main())


def test_roles_are_remembered() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, instance_of(engine) as instance:
            instance.link.send(SetRole(role="decode", term=2))
            instance.link.send(SetRole(role="prefill", term=1))
            load = await heard(instance, EngineLoad)
            while not load.term:
                load = await heard(instance, EngineLoad)
            assert (load.role, load.term) == ("decode", 2)

    asyncio.run(main())


def test_draining_finishes_what_runs() -> None:
    async def main() -> None:
        async with ForeignEngine(chunk_s=0.002) as engine, instance_of(engine) as instance:
            instance.link.send(Submit(request=request()))
            instance.link.send(Drain())
            items = []
            while not isinstance(message := await instance.link.recv(), Drained):
                assert not isinstance(message, Failed)
                items += message.items if isinstance(message, Deltas) else []
            assert [token for item in items for token in item.token_ids] == WHOLE
            assert await instance.wait() == "drained"

    asyncio.run(main())


def test_clearing_the_cache() -> None:
    async def main() -> None:
        async with ForeignEngine() as engine, gateway_over(engine) as gateway:
            assert [(each.complete, each.error) for each in await gateway.clear_cache()] == [(True, None)]
            engine.clears = False
            assert [(each.complete, each.error) for each in await gateway.clear_cache()] == [(False, None)]
            engine.clears = None
            (cleared,) = await gateway.clear_cache()
            assert not cleared.complete
            assert "/reset_prefix_cache answers 404: Not Found" in str(cleared.error)

    asyncio.run(main())
