"""An engine whose steps take a fixed real time and compute nothing: what is left between them is the books' work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from kllm.cache.kv_spec import Group, KVSpec, Record
from kllm.cache.manager import KVManager
from kllm.engine.core import EngineCore
from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.messages import Deltas, Down, Drain, Hello, Submit, Up
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import Late, Plan, RowResult, StepResult
from kllm.scheduling.scheduler import Scheduler
from kllm.transport.link import Link
from kllm.transport.memory import memory_pair

BLOCK_TOKENS = 16
SPEC = KVSpec((Group("full", (Record("kv", 1, (64,), "float32"),)),), BLOCK_TOKENS, model="paced")  # 256 B a token


class PacedExecutor:
    """Executor port: a step takes step_s seconds on a thread of its own, asleep. bubbles: (tokens of KV before the
    step, seconds that the thread waited for its plan), of steps that came right after another."""

    def __init__(self, step_s: float) -> None:
        self.depth = 1
        self.bubbles: list[tuple[int, float]] = []
        self._step_s = step_s
        self._queue: SimpleQueue[tuple[Plan, Future[StepResult], float] | None] = SimpleQueue()
        self._computed: dict[int, int] = {}
        self._idle = True  # there was nothing to do before the step that comes
        self._thread = threading.Thread(target=self._run, name="paced", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> Future[StepResult]:
        done: Future[StepResult] = Future()
        done.set_running_or_notify_cancel()
        self._queue.put((plan, done, time.perf_counter()))
        return done

    def bind(self, plan_id: int, late: Late) -> None:
        """No masks here."""

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def forget(self) -> None:
        """Begin anew: what was measured is dropped, and the next step follows none."""
        self.bubbles.clear()
        self._idle = True

    def _run(self) -> None:
        ended = 0.0
        while (item := self._queue.get()) is not None:
            plan, done, submitted = item
            before = self._follow(plan)
            if not self._idle:
                self.bubbles.append((before, submitted - ended))
            self._idle = False
            time.sleep(self._step_s)
            ended = time.perf_counter()
            done.set_result(StepResult(plan.id, {step.row: RowResult(7) for step in plan.steps}, self._step_s))

    def _follow(self, plan: Plan) -> int:
        """Most tokens of KV that a row of the plan has before it."""
        for new in plan.new:
            self._computed[new.row] = new.start
        longest = 0
        for step in plan.steps:
            before = self._computed[step.row] + step.skip
            longest = max(longest, before)
            self._computed[step.row] = before + step.count
        return longest


class PacedInstance:
    """The production instance_main around a PacedExecutor."""

    def __init__(self, executor: PacedExecutor, kv: KVManager, chunk: int, *, looks_up: bool) -> None:
        self.executor = executor
        self.core = EngineCore(
            Scheduler(
                kv,
                max_model_len=kv.pool.num_blocks * BLOCK_TOKENS,
                max_num_seqs=16,
                max_tokens_per_step=chunk,
                looks_up=looks_up,
            ),
            executor,
            time.monotonic,
        )
        self._near: Link[Up, Down]
        self._main: asyncio.Task[None]

    def start(self) -> None:
        self._near, far = memory_pair()
        hello = Hello(instance_id="paced", incarnation="1")
        self._main = asyncio.ensure_future(instance_main(far, self.core, None, ThreadWorkers(), hello))

    async def run(self, prompts: list[list[int]], max_tokens: int = 1) -> list[float]:
        """All at once; seconds to the first token of each."""
        began = time.perf_counter()
        waits = {}
        for number, prompt in enumerate(prompts):
            request = Request(
                request_id=f"{began}/{number}",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            )
            self._near.send(Submit(request=request))
        left = len(prompts)
        while left:
            message = await self._near.recv()
            if isinstance(message, Deltas):
                for delta in message.items:
                    waits.setdefault(delta.request_id, time.perf_counter() - began)
                    left -= delta.finish_reason is not None
        return [waits[f"{began}/{number}"] for number in range(len(prompts))]

    async def stop(self) -> None:
        self._near.send(Drain())
        await self._main
        self.executor.close()


def paced(
    step_s: float, num_blocks: int, chunk: int, make_kv: Callable[[int], KVManager], *, looks_up: bool = False
) -> PacedInstance:
    return PacedInstance(PacedExecutor(step_s), make_kv(num_blocks), chunk, looks_up=looks_up)
