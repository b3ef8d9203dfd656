"""Random histories over 1 to 4 instances: requests, slow and leaving clients, crashes, hangs, failing starts, and links
that lose, repeat and reorder messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.lossy_link import Weather
from support.scripted_instance import LATE_POISON, POISON, Faults, TaskLauncher, make_request, reference
from support.virtual_time import VirtualTimeLoop

from kllm.cluster.gateway import Gateway, QueueFull, RequestStream, Unavailable
from kllm.cluster.request_stream import End
from kllm.request import Delta


class Client:
    """Reads a stream at its own pace."""

    def __init__(self, stream: RequestStream, pause_s: float) -> None:
        self.stream = stream
        self.pause_s = pause_s
        self.left = False
        self.deltas: list[Delta] = []
        self.task = asyncio.create_task(self.read())

    async def read(self) -> None:
        async for delta in self.stream:
            self.deltas.append(delta)
            await asyncio.sleep(self.pause_s)

    async def leave(self) -> None:
        self.left = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.stream.aclose()

    def check(self) -> None:
        tokens, reason = reference(self.stream.request)
        seen = [token for delta in self.deltas for token in delta.token_ids]
        assert seen == tokens[: len(seen)]
        assert all(delta.finish_reason is None for delta in self.deltas[:-1])
        last = self.deltas[-1].finish_reason if self.deltas else None
        if last in ("stop", "length"):
            assert (seen, last) == (tokens, reason)
        if self.task.done() and not self.left:
            assert last is not None, "the stream stopped without an end"
            poison = {POISON: 0, LATE_POISON: 9}.get(self.stream.request.prompt_token_ids[0])
            if poison is not None and len(tokens) > poison:  # a late one may yield 3 tokens in each of 3 attempts
                assert last == "error"


class GatewayHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self.faults = Faults()
        self.weather = Weather(delay_s=1.5)
        self.launchers: list[TaskLauncher] = []
        self.clients: list[Client] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(main)

    @initialize(count=st.integers(1, 4), start_s=st.lists(st.sampled_from([0.1, 0.5, 3.0]), min_size=4, max_size=4))
    def start(self, count: int, start_s: list[float]) -> None:
        async def main() -> None:
            self.launchers = [TaskLauncher(self.faults, weather=self.weather) for _ in range(count)]
            for launcher, seconds in zip(self.launchers, start_s, strict=False):
                launcher.start_s = seconds
            rng = random.Random(1)
            self.gateway = Gateway(self.launchers, rng=rng, max_queue=8, max_restarts=3, silence_limit=5.0)
            await self.gateway.start()

        self.run(main())

    @rule(
        first=st.sampled_from([1, 2, 3, 4, 5, 6, POISON, LATE_POISON]),
        max_tokens=st.integers(1, 60),
        ignore_eos=st.booleans(),
        pause_s=st.sampled_from([0.0, 0.03, 1.0]),
    )
    def submit(self, first: int, max_tokens: int, ignore_eos: bool, pause_s: float) -> None:
        async def main() -> None:
            request = make_request(str(len(self.clients)), [first], max_tokens=max_tokens, ignore_eos=ignore_eos)
            full = self.gateway.in_flight == 8
            try:
                self.clients.append(Client(self.gateway.generate(request), pause_s))
                assert not full
            except QueueFull:
                assert full
            except Unavailable:
                assert not self.gateway.ready

        self.run(main())

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.run(data.draw(st.sampled_from(self.clients)).leave())

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.02, 0.1, 1.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(which=st.integers(0, 3), then=st.lists(st.sampled_from(["launch", "failed", "exit"]), max_size=2))
    def kill(self, which: int, then: list[str]) -> None:
        launcher = self.launchers[which % len(self.launchers)]
        launcher.failures = then
        launcher.instances[-1].kill()

    @rule(hung=st.booleans(), seed=st.integers(0, 99))
    def disturb(self, hung: bool, seed: int) -> None:
        rng = self.faults.rng = random.Random(seed)
        self.faults.hung = hung
        self.faults.repeat, self.faults.stale, self.faults.late_finish = (rng.choice((0.0, 0.4)) for _ in range(3))
        self.faults.skip = rng.choice((0.0, 0.02))

    @rule(
        lose=st.sampled_from([0.0, 0.02, 0.2]),
        repeat=st.sampled_from([0.0, 0.3]),
        late=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 99),
    )
    def change_weather(self, lose: float, repeat: float, late: float, seed: int) -> None:
        self.weather.lose, self.weather.repeat, self.weather.late = lose, repeat, late
        self.weather.rng = random.Random(seed)

    @invariant()
    def consistent(self) -> None:
        self.gateway.check()
        for client in self.clients:
            client.check()
        assert not self.problems, self.problems

    def teardown(self) -> None:
        self.faults.hung, self.faults.skip = False, 0.0
        self.change_weather(0.0, 0.0, 0.0, 0)
        self.run(self.gateway.drain(10_000.0))
        self.run(asyncio.sleep(1000.0))
        self.consistent()
        assert self.gateway.in_flight == 0
        assert self.gateway.accepted == len(self.clients)
        assert all(client.task.done() for client in self.clients)
        left = sum(client.stream.end is End.ABORT for client in self.clients)
        assert self.gateway.ended[End.ABORT] == left <= sum(client.left for client in self.clients)
        assert not any(launcher.running for launcher in self.launchers)
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


GatewayHistory.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestGatewayHistory = GatewayHistory.TestCase
