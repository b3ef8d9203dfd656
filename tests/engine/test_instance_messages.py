"""instance_main in virtual time, before a gateway whose messages are lost, repeated or late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from support.page_memory import DictStore, MemoryMover
from support.simulated_runner import SimulatedRunner, reference_output
from support.virtual_time import run

from kllm.cache.manager import KVManager
from kllm.cache.tiers.settings import TierSettings
from kllm.cache.tiers.store_link import StoreLink
from kllm.cache.tiers.tiered_cache import TieredCache
from kllm.engine.core import EngineCore
from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.messages import (
    Abort,
    CacheCleared,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Hello,
    Ping,
    PrefillDone,
    Submit,
    Up,
    decode_up,
    encode,
)
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import Late, Plan, StepResult
from kllm.scheduling.scheduler import Scheduler
from kllm.scheduling.sequence import Sequence
from kllm.transport.link import Link, LinkClosed
from kllm.transport.memory import memory_pair

STEP_S = 0.01
VOCABULARY = 50


class TimedRunner:
    """A SimulatedRunner whose steps take STEP_S; while `stuck` none of them ends."""

    depth = 1

    def __init__(self) -> None:
        self.runner = SimulatedRunner(64, 8, vocab_size=VOCABULARY)
        self.stuck = False
        self._running: Plan | None = None

    def submit(self, plan: Plan) -> Future[StepResult]:
        if self._running is not None:
            self.runner.committed(self._running.id)
        self._running = plan
        future = self.runner.submit(plan)
        asyncio.get_running_loop().call_later(STEP_S, self._end)
        return future

    def _end(self) -> None:
        if self.stuck:
            asyncio.get_running_loop().call_later(STEP_S, self._end)
        else:
            self.runner.advance()

    def bind(self, plan_id: int, late: Late) -> None:
        self.runner.bind(plan_id, late)

    def close(self) -> None: ...


class Peer:
    """The gateway's end. Keeps all that comes."""

    def __init__(self, link: Link[Up, Down], core: EngineCore, executor: TimedRunner) -> None:
        self.link = link
        self.core = core
        self.executor = executor
        self.scheduler = core.scheduler
        self.messages: list[Up] = []

    async def listen(self) -> None:
        try:
            while True:
                self.messages.append(decode_up(encode(await self.link.recv())))
        except LinkClosed:
            pass

    def send(self, *messages: Down) -> None:
        for message in messages:
            self.link.send(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def outputs(self, request_id: str) -> list[tuple[int, list[int]]]:
        """(attempt, tokens) of each attempt that has yielded any, in order; no token is missing or repeated in one."""
        found: list[tuple[int, list[int]]] = []
        for deltas in self.of(Deltas):
            for delta in deltas.items:
                if delta.request_id == request_id:
                    if not found or found[-1][0] != delta.attempt:
                        found.append((delta.attempt, []))
                        start = delta.index
                    assert delta.index == start + len(found[-1][1])
                    found[-1][1].extend(delta.token_ids)
        return found

    @property
    def reports(self) -> list[EngineLoad]:
        """Those of every second."""
        return [load for load in self.of(EngineLoad) if load.progress is not None]


def serve(talk: Callable[[Peer], Awaitable[None]], *, ends: bool = False, **options: Any) -> None:
    """Run an instance and talk to it. ends: it must have ended by itself when the talk is over."""

    async def main() -> None:
        upper, lower = memory_pair()
        scheduler = Scheduler(KVManager(64, 8, True), max_model_len=400, max_num_seqs=4, max_tokens_per_step=64)
        executor = TimedRunner()
        core = EngineCore(scheduler, executor, asyncio.get_running_loop().time)
        hello = Hello(instance_id="i", incarnation="x")
        instance = asyncio.ensure_future(instance_main(lower, core, None, ThreadWorkers(), hello, **options))
        peer = Peer(upper, core, executor)
        listening = asyncio.ensure_future(peer.listen())
        await talk(peer)
        assert not ends or instance.done()
        scheduler.check()
        upper.close()
        await asyncio.gather(instance, listening)

    run(main())


def submit(request_id: str = "r", attempt: int = 0, outputs: int = 0, max_tokens: int = 20) -> Submit:
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id=request_id, prompt_token_ids=[1, 2, 3], params=params)
    return Submit(request=request, outputs=expected(request)[:outputs], attempt=attempt)


def expected(request: Request) -> list[int]:
    return reference_output(request, vocab_size=VOCABULARY, eos=-1, length=400)[0]


def test_a_repeated_submit_changes_nothing() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit(), submit())
        await asyncio.sleep(5 * STEP_S)
        peer.send(submit())
        await asyncio.sleep(1.0)
        peer.send(submit())  # it has ended
        await asyncio.sleep(1.0)
        assert peer.outputs("r") == [(0, expected(submit().request))]

    serve(talk)


def test_an_older_attempt_that_comes_late_is_ignored() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit(attempt=2, outputs=4), submit(attempt=1, outputs=2))
        await asyncio.sleep(5 * STEP_S)
        peer.send(submit(attempt=1, outputs=2))
        await asyncio.sleep(1.0)
        peer.send(submit(attempt=1, outputs=2))
        await asyncio.sleep(1.0)
        assert peer.outputs("r") == [(2, expected(submit().request)[4:])]

    serve(talk)


def test_a_newer_attempt_replaces_an_older_one() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit())
        await asyncio.sleep(5 * STEP_S)
        peer.send(submit(attempt=1, outputs=2))
        await asyncio.sleep(1.0)
        (first, start), (second, rest) = peer.outputs("r")
        assert (first, second) == (0, 1)
        assert start == expected(submit().request)[: len(start)]
        assert rest == expected(submit().request)[2:]

    serve(talk)


def test_an_abort_stops_its_own_attempt_only() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit(attempt=1), Abort(request_ids=["r"], attempt=0))
        await asyncio.sleep(1.0)
        assert peer.outputs("r") == [(1, expected(submit().request))]
        peer.send(Abort(request_ids=["early", "unknown"], attempt=0), submit("early"))
        await asyncio.sleep(1.0)
        assert peer.outputs("early") == []
        peer.send(submit("a", max_tokens=300), submit("b", attempt=7, max_tokens=300))
        await asyncio.sleep(0.1)
        peer.send(Abort(request_ids=["a", "b"]))
        await asyncio.sleep(0.1)
        assert peer.scheduler.num_unfinished == 0

    serve(talk)


def test_every_second_it_reports_what_it_holds() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(Ping())
        await asyncio.sleep(1.5)
        assert [report.progress for report in peer.reports] == [{}, {}]
        peer.send(submit("a", max_tokens=300), submit("b", attempt=3, outputs=5, max_tokens=300))
        await asyncio.sleep(0.7)
        progress = peer.reports[-1].progress
        assert progress is not None
        assert {request_id: attempt for request_id, (attempt, _) in progress.items()} == {"a": 0, "b": 3}
        arrived = {name: sum(len(tokens) for _, tokens in peer.outputs(name)) for name in "ab"}
        assert 30 < progress["a"][1] <= arrived["a"]
        assert 30 < progress["b"][1] <= arrived["b"] + 5
        sequences = [load.sequence for load in peer.of(EngineLoad)]
        assert sequences == list(range(1, len(sequences) + 1))

    serve(talk)


def test_reports_go_on_while_the_executor_hangs() -> None:
    async def talk(peer: Peer) -> None:
        peer.executor.stuck = True
        peer.send(submit())
        await asyncio.sleep(10.0)
        assert [(report.running, report.steps) for report in peer.reports[-5:]] == [(1, 0)] * 5
        peer.executor.stuck = False
        await asyncio.sleep(1.0)
        assert peer.outputs("r") == [(0, expected(submit().request))]

    serve(talk)


def test_hello_is_repeated_until_something_is_heard() -> None:
    async def talk(peer: Peer) -> None:
        await asyncio.sleep(3.5)
        assert len(peer.of(Hello)) == 4
        peer.send(Ping())
        await asyncio.sleep(5.0)
        assert len(peer.of(Hello)) == 4

    serve(talk)


@pytest.mark.parametrize("busy", [False, True])
def test_a_gateway_that_falls_silent_is_gone(busy: bool) -> None:
    async def talk(peer: Peer) -> None:
        for _ in range(20):
            peer.send(Ping())
            await asyncio.sleep(4.0)
        if busy:
            peer.executor.stuck = True
            peer.send(submit())
        await asyncio.sleep(4.0)
        assert len(peer.reports) > 80
        await asyncio.sleep(4.0)

    serve(talk, ends=True, lease_s=5.0)


def test_without_pings_there_is_no_lease() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit())
        await asyncio.sleep(100.0)
        peer.send(Drain())
        await asyncio.sleep(0.1)
        assert peer.of(Drained)

    serve(talk, ends=True, lease_s=5.0)


def test_clearing_the_cache() -> None:
    async def talk(peer: Peer) -> None:
        peer.send(submit("r", max_tokens=100))
        await asyncio.sleep(20 * STEP_S)
        peer.send(ClearCache(token="a"), ClearCache(token="b", store=True))
        await asyncio.sleep(0.1)
        assert peer.of(CacheCleared) == [CacheCleared(token=token, complete=False) for token in "ab"]
        await asyncio.sleep(2.0)
        peer.send(ClearCache(token="c"))
        await asyncio.sleep(0.1)
        assert peer.of(CacheCleared)[2:] == [CacheCleared(token="c", complete=True)]
        assert peer.scheduler.kv.cached == 0

    serve(talk)


def test_a_question_that_comes_again_is_answered_once_and_an_error_told() -> None:
    async def talk(peer: Peer) -> None:
        store = DictStore(delay=lambda: 5.0)
        clock = asyncio.get_running_loop().time
        kv = KVManager(8, 8, fingerprint="00")
        link = StoreLink(store, "00", clock)
        settings = TierSettings()
        tiers = TieredCache(kv, 8, MemoryMover(8, 8), link, settings, ThreadWorkers(), clock)
        peer.core.use_tiers(tiers)
        for _ in range(4):
            peer.send(ClearCache(token="a", store=True))
            await asyncio.sleep(1.0)
        await asyncio.sleep(3.0)
        assert peer.of(CacheCleared) == [CacheCleared(token="a", complete=True)]
        assert store.calls == 1
        store.broken = True
        peer.send(ClearCache(token="b", store=True), ClearCache(token="c"))
        await asyncio.sleep(6.0)
        told = CacheCleared(token="b", complete=False, error="the store is broken")
        assert peer.of(CacheCleared)[1:] == [CacheCleared(token="c", complete=True), told]
        await tiers.close()

    serve(talk)


def prefill_only(request_id: str) -> Submit:
    return msgspec.structs.replace(submit(request_id), prefill_only=True)


def prefilled(messages: list[Up]) -> list[PrefillDone]:
    return [message for message in messages if isinstance(message, PrefillDone)]


def test_one_that_drains_hands_over_what_it_has_prefilled() -> None:
    """The last request there ends with the step after which nothing is left to do."""

    async def talk(peer: Peer) -> None:
        real = peer.core.hand_over

        async def slow(sequence: Sequence) -> PrefillDone:
            await asyncio.sleep(0.5)
            return await real(sequence)

        peer.core.hand_over = slow  # type: ignore[method-assign]
        peer.send(prefill_only("r"))
        peer.send(Drain())
        await asyncio.sleep(3)
        assert len(prefilled(peer.messages)) == 1
        assert isinstance(peer.messages[-1], Drained)

    serve(talk, ends=True)


def test_kv_that_cannot_be_handed_over_is_computed_elsewhere() -> None:
    async def talk(peer: Peer) -> None:
        async def broken(sequence: Sequence) -> PrefillDone:
            raise RuntimeError("no room")

        async def hanging(sequence: Sequence) -> PrefillDone:
            return await asyncio.get_running_loop().create_future()

        for name, hand_over in (("broken", broken), ("hanging", hanging)):
            peer.core.hand_over = hand_over  # type: ignore[method-assign]
            peer.send(prefill_only(name))
            await asyncio.sleep(10)
        done = prefilled(peer.messages)
        assert [(message.request_id, message.num_outputs, message.kv) for message in done] == [
            ("broken", 1, None),
            ("hanging", 1, None),
        ]

    serve(talk)
