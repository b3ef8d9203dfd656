"""One simulated instance without a gateway: the production core and scheduler, and when each of its tokens came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kllm.config import EngineConfig
from kllm.costs.noise import NoisyStepTime
from kllm.costs.step import StepTimeModel
from kllm.engine.assembly import make_scheduler
from kllm.engine.core import EngineCore
from kllm.messages import Submit
from kllm.request import Delta, Request, SamplingParams
from kllm.simulation.executor import PlanningCost, SimulatedExecutor
from kllm.simulation.loop import run as run_in_virtual_time
from kllm.simulation.node import Node
from kllm.workload.sample import Sample, TokenSource

PLANNING = PlanningCost(150e-6, 12e-6)  # as kllm simulate has it
NOISE = 0.05
DEPTH = 2  # plans in flight
VOCAB_SIZE = 1000


@dataclass(frozen=True)
class Machine:
    """What serves: how long its steps take, and what it holds. top_k: tokens attended to at most."""

    name: str
    times: StepTimeModel
    kv_tokens: int
    max_model_len: int
    top_k: int | None = None


@dataclass
class Client:
    """When the tokens of one request came, in seconds."""

    arrived: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def tpot(self) -> float | None:
        count = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / count if count else None


def serve(machine: Machine, config: EngineConfig, samples: Sequence[Sample], seed: int) -> list[Client]:
    """Every request of the load, served to its end."""

    async def main() -> list[Client]:
        return await _Service(machine, config, samples, seed).run()

    return run_in_virtual_time(main())


class _Service:
    def __init__(self, machine: Machine, config: EngineConfig, samples: Sequence[Sample], seed: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._samples = samples
        self._source = TokenSource(seed, VOCAB_SIZE)
        scheduler = make_scheduler(
            config,
            num_blocks=machine.kv_tokens // config.block_size,
            max_model_len=machine.max_model_len,
            eos_token_ids=(),
        )
        executor = SimulatedExecutor(
            Node(0, bytes_per_s=1e9),
            NoisyStepTime(machine.times, random.Random(seed), NOISE),
            vocab_size=VOCAB_SIZE,
            depth=DEPTH,
            planning=PLANNING,
            top_k=machine.top_k,
        )
        self._core = EngineCore(scheduler, executor, self._loop.time)
        self._clients: dict[str, Client] = {}
        self._arrival = asyncio.Event()

    async def run(self) -> list[Client]:
        for index, sample in enumerate(self._samples):
            self._loop.call_at(sample.arrival_s, self._arrive, index)
        core = self._core
        while len(self._clients) < len(self._samples) or core.num_unfinished:
            core.fill()
            step = core.oldest
            if step is None:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            assert isinstance(step, asyncio.Future), "a simulated step is a future of the loop"
            for delta in core.commit(await step):
                self._take(delta)
        return list(self._clients.values())

    def _arrive(self, index: int) -> None:
        sample = self._samples[index]
        params = SamplingParams(max_tokens=sample.output_len, ignore_eos=True, seed=index)
        request = Request(request_id=f"{index}", prompt_token_ids=self._source.prompt(sample), params=params)
        self._clients[request.request_id] = Client(self._loop.time())
        refused = self._core.add(Submit(request=request))
        if refused is not None:
            raise ValueError(f"request {index} cannot be served: {refused.error}")
        self._arrival.set()

    def _take(self, delta: Delta) -> None:
        self._clients[delta.request_id].tokens += [self._loop.time()] * len(delta.token_ids)
