"""instance_main on a memory link, with a real engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.engines import make_engine

from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.engine.loading import Engine
from kllm.messages import Abort, Deltas, Down, Drain, Drained, EngineLoad, Failed, Hello, Submit, Up
from kllm.request import Delta, Request, SamplingParams, StructuredOutputs
from kllm.scheduling.plan import Plan, StepResult
from kllm.transport.link import Link, LinkClosed
from kllm.transport.memory import memory_pair

HANG_S = 60.0


@pytest.fixture
def engine(tiny_llama_folder: Path) -> Iterator[Engine]:
    engine = make_engine(tiny_llama_folder, num_kv_blocks=32, block_size=8, max_num_batched_tokens=32)
    yield engine
    engine.core.close()


class Peer:
    """The gateway's end: collects what each request got."""

    def __init__(self, link: Link[Up, Down]) -> None:
        self.link = link
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Delta] = {}
        self.loads: list[EngineLoad] = []

    async def until(self, done: Callable[[Up], bool]) -> Up:
        """Messages until one that `done` accepts, which is returned."""
        async with asyncio.timeout(HANG_S):
            while True:
                message = await self.link.recv()
                if isinstance(message, EngineLoad):
                    self.loads.append(message)
                for delta in message.items if isinstance(message, Deltas) else ():
                    self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                    if delta.finish_reason is not None:
                        self.last[delta.request_id] = delta
                if done(message):
                    return message

    async def ends(self, *request_ids: str) -> None:
        await self.until(lambda _: set(request_ids) <= self.last.keys())


def serve(engine: Engine, talk: Callable[[Peer], Awaitable[None]]) -> None:
    """Run an instance and talk to it; the instance must end by itself after the talk."""

    async def main() -> None:
        upper, lower = memory_pair()
        hello = Hello(instance_id="i", incarnation="x")
        instance = asyncio.ensure_future(instance_main(lower, engine.core, engine.compiler, ThreadWorkers(), hello))
        peer = Peer(upper)
        await peer.until(lambda message: isinstance(message, Hello))
        await talk(peer)
        async with asyncio.timeout(HANG_S):
            await instance

    asyncio.run(main())


def submit(request_id: str, max_tokens: int = 5, **options: object) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]
    prompt = [ord(c) for c in request_id * 4]
    return Submit(request=Request(request_id=request_id, prompt_token_ids=prompt, params=params))


def test_requests_run_together_and_drain_ends_the_instance(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        for name in "abc":
            peer.link.send(submit(name))
        peer.link.send(Drain())
        await peer.until(lambda message: isinstance(message, Drained))
        assert {name: len(tokens) for name, tokens in peer.tokens.items()} == {"a": 5, "b": 5, "c": 5}
        assert all(delta.finish_reason == "length" for delta in peer.last.values())

    serve(engine, talk)
    assert engine.core.scheduler.kv.available == 32


def test_abort_frees_the_blocks(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        peer.link.send(submit("long", max_tokens=200))
        await peer.until(lambda _: len(peer.tokens.get("long", ())) > 3)
        peer.link.send(Abort(request_ids=["long", "unknown"]))
        await peer.until(lambda message: isinstance(message, EngineLoad) and message.running == 0)
        assert peer.loads[-1].kv_usage == 0.0
        peer.link.send(submit("next"))
        await peer.ends("next")
        peer.link.close()

    serve(engine, talk)
    engine.core.scheduler.check()


def test_a_resubmission_goes_on_where_the_earlier_attempt_was(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        peer.link.send(submit("whole", max_tokens=8))
        await peer.ends("whole")
        first = peer.tokens["whole"]
        request = submit("whole", max_tokens=8).request
        peer.tokens.clear()
        peer.last.clear()
        peer.link.send(Submit(request=request, outputs=first[:3], attempt=1))
        await peer.ends("whole")
        assert peer.tokens["whole"] == first[3:]
        assert peer.last["whole"].attempt == 1
        peer.last.clear()
        peer.link.send(Submit(request=request, outputs=first, attempt=2))  # only the last word was lost
        await peer.ends("whole")
        assert peer.last["whole"].finish_reason == "length"
        peer.link.close()

    serve(engine, talk)


def test_structured_requests_wait_for_their_grammar_only(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        good = StructuredOutputs(choice=("yes", "no"))
        bad = StructuredOutputs(regex="(")
        peer.link.send(submit("good", structured_outputs=good))
        peer.link.send(submit("bad", structured_outputs=bad))
        peer.link.send(submit("plain"))
        await peer.ends("good", "bad", "plain")
        assert engine.tokenizer.decode(peer.tokens["good"]) in ("yes", "no")
        assert peer.last["bad"].invalid
        assert peer.last["bad"].finish_reason == "error"
        assert len(peer.tokens["plain"]) == 5
        peer.link.close()

    serve(engine, talk)


def test_an_aborted_request_may_still_get_its_grammar(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        peer.link.send(submit("gone", structured_outputs=StructuredOutputs(json_object=True)))
        peer.link.send(Abort(request_ids=["gone"]))
        peer.link.send(submit("plain"))
        await peer.ends("plain")
        assert "gone" not in peer.tokens
        peer.link.close()

    serve(engine, talk)
    assert engine.core.num_unfinished == 0


def test_impossible_requests_are_refused_at_once(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        params = SamplingParams(max_tokens=100)
        peer.link.send(Submit(request=Request(request_id="big", prompt_token_ids=list(range(200)), params=params)))
        await peer.ends("big")
        assert peer.last["big"].invalid
        assert "KV cache" in (peer.last["big"].error or "")
        peer.link.close()

    serve(engine, talk)


class BrokenExecutor:
    """An executor whose device is gone."""

    depth = 1

    def submit(self, plan: Plan) -> Future[StepResult]:
        done: Future[StepResult] = Future()
        done.set_exception(RuntimeError("the device is gone"))
        return done

    def bind(self, plan_id: int, late: object) -> None: ...

    def close(self) -> None: ...


def test_a_broken_executor_is_reported_before_the_instance_ends(engine: Engine) -> None:
    engine.core.close()
    engine.core.executor = BrokenExecutor()

    async def talk(peer: Peer) -> None:
        peer.link.send(submit("a"))
        message = await peer.until(lambda message: isinstance(message, Failed))
        assert isinstance(message, Failed)
        assert "the device is gone" in message.error

    with pytest.raises(RuntimeError, match="the device is gone"):
        serve(engine, talk)


def test_a_closed_link_ends_the_instance(engine: Engine) -> None:
    async def talk(peer: Peer) -> None:
        peer.link.send(submit("a", max_tokens=200))
        await peer.until(lambda _: "a" in peer.tokens)
        peer.link.close()
        with pytest.raises(LinkClosed):
            await peer.link.recv()

    serve(engine, talk)
