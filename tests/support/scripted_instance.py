"""An instance without an engine: real messages, predictable tokens, faults on demand."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from support.lossy_link import LossyLink, Weather

from kllm.cluster.launchers.launcher import LaunchError
from kllm.messages import (
    Abort,
    CacheCleared,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Failed,
    Hello,
    KvSource,
    Ping,
    PrefillDone,
    Release,
    Role,
    SetGrade,
    SetRole,
    Starting,
    Submit,
    Up,
)
from kllm.request import Delta, FinishReason, Request, SamplingParams, Timings, TokenLogprobs
from kllm.transport.link import Link, LinkClosed
from kllm.transport.memory import memory_pair

VOCABULARY = 1000
STOP_TOKEN = 0
POISON = 666  # as the first token of a prompt: kills the instance when the request is first computed
LATE_POISON = 667  # kills it at the first step after the prompt's
STEP_S = 0.01


def token_at(request: Request, position: int) -> int:
    """Depends on the prompt, the seed and the position only, as a seeded sampler's draws do."""
    return zlib.crc32(repr((request.prompt_token_ids, request.params.seed, position)).encode()) % VOCABULARY


def reference(request: Request) -> tuple[list[int], FinishReason]:
    """The whole output of an admitted request."""
    tokens: list[int] = []
    assert request.params.max_tokens is not None
    while len(tokens) < request.params.max_tokens:
        tokens.append(token_at(request, len(tokens)))
        if tokens[-1] == STOP_TOKEN and not request.params.ignore_eos:
            return tokens, "stop"
    return tokens, "length"


def make_request(request_id: str = "r", prompt: list[int] | None = None, **params: object) -> Request:
    return Request(request_id=request_id, prompt_token_ids=prompt or [1, 2, 3], params=SamplingParams(**params))  # type: ignore[arg-type]


@dataclass
class Faults:
    """Probabilities per delta, and switches. All are read at every step, so tests may change them."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    repeat: float = 0.0  # the delta starts with tokens already sent
    stale: float = 0.0  # a delta of the previous attempt comes first
    skip: float = 0.0  # tokens are lost before the delta
    late_finish: float = 0.0  # the finish follows in a delta of its own, a step later
    crash: float = 0.0  # per step
    fragile: bool = False  # dies at the first step for a request
    failing: bool = False  # every request ends with an error
    hung: bool = False
    stuck: bool = False  # takes requests and reports, but makes no step
    silent: bool = False  # works, but sends no EngineLoad
    store_error: str | None = None  # why its store cannot be cleared


@dataclass
class Running:
    submit: Submit
    done: int  # tokens sent in all attempts
    fresh: bool = True  # no step yet in this attempt


class Crash(Exception):
    pass


class ScriptedInstance:
    def __init__(self, link: Link[Down, Up], faults: Faults, hello: Hello, start_s: float = 0.0) -> None:
        self.link = link
        self.faults = faults
        self.hello = hello
        self.start_s = start_s
        self.running: dict[str, Running] = {}
        self.attempts: dict[str, int] = {}  # the highest seen of each id
        self.submits: list[Submit] = []  # as taken, without repeated and late ones
        self.heard: list[Down] = []
        self.draining = False
        self.role: Role = hello.role
        self.term = hello.term
        self.grade = 0
        self.leases: set[str] = set()

    async def main(self) -> None:
        self.link.send(Starting(phase="loading weights", fraction=0.5))
        await asyncio.sleep(self.start_s)
        self.link.send(self.hello)
        inbox = asyncio.create_task(self._read())
        loop = asyncio.get_running_loop()
        steps, sequence, next_load = 0, 0, 0.0
        try:
            while not inbox.done() and not (self.draining and not self.running):
                await asyncio.sleep(STEP_S)
                if self.faults.hung:
                    continue
                if not self.faults.stuck:
                    steps += bool(self.running)
                    self._step()
                if loop.time() >= next_load and not self.faults.silent:
                    if not self.heard and sequence > 0:
                        self.link.send(self.hello)
                    sequence += 1
                    self.link.send(self._load(steps, sequence))
                    next_load = loop.time() + 1.0
            if self.draining:
                self.link.send(Drained())
        except LinkClosed:
            pass
        finally:
            inbox.cancel()
            await asyncio.gather(inbox, return_exceptions=True)
            self.link.close()

    def _load(self, steps: int, sequence: int) -> EngineLoad:
        return EngineLoad(
            running=len(self.running),
            steps=steps,
            prefix_queries=steps,
            sequence=sequence,
            role=self.role,
            term=self.term,
            grade=self.grade,
            progress={request_id: (run.submit.attempt, run.done) for request_id, run in self.running.items()},
        )

    async def _read(self) -> None:
        while True:
            message = await self.link.recv()
            self.heard.append(message)
            match message:
                case Submit():
                    self._take(message)
                case Abort(request_ids=ids, attempt=attempt):
                    for request_id in ids:
                        if attempt is None:
                            self.running.pop(request_id, None)
                        elif attempt >= self.attempts.get(request_id, -1):
                            self.attempts[request_id] = attempt
                            self.running.pop(request_id, None)
                case SetGrade(grade=grade):
                    self.grade = grade
                case Drain():
                    self.draining = True
                case Release(leases=leases):
                    self.leases -= set(leases)
                case SetRole(role=role, term=term) if term > self.term:
                    self.role, self.term = role, term
                case ClearCache(token=token, store=store) if not self.faults.hung:
                    error = self.faults.store_error if store else None
                    self.link.send(CacheCleared(token=token, complete=not self.running and not error, error=error))
                case Ping():
                    pass

    def _take(self, submit: Submit) -> None:
        request_id = submit.request.request_id
        if submit.attempt > self.attempts.get(request_id, -1):
            self.attempts[request_id] = submit.attempt
            self.submits.append(submit)
            self.running[request_id] = Running(submit, len(submit.outputs))

    def _step(self) -> None:
        if self.faults.fragile and self.running:
            raise Crash
        items: list[Delta] = []
        for run in list(self.running.values()):
            items += self._advance(run)
        if items:
            self.link.send(Deltas(items=items))
        self._hand_over()
        if self.faults.rng.random() < self.faults.crash:
            raise Crash

    def _hand_over(self) -> None:
        """What was only to be prefilled here and has not ended goes on elsewhere."""
        for request_id, run in list(self.running.items()):
            if not run.submit.prefill_only:
                continue
            del self.running[request_id]
            lease = f"{self.hello.instance_id}/{request_id}/{run.submit.attempt}"
            self.leases.add(lease)
            kv = KvSource(lease=lease, address="shm:test", page_bytes=16, slots=[0], checksums=[0])
            attempt = run.submit.attempt
            self.link.send(PrefillDone(request_id=request_id, attempt=attempt, num_outputs=run.done, kv=kv))

    def _advance(self, run: Running) -> list[Delta]:
        request, faults = run.submit.request, self.faults
        if faults.failing:
            del self.running[request.request_id]
            failed = self._delta(run, run.done, [], run.submit.attempt, "error")
            return [msgspec.structs.replace(failed, error="broken")]
        first = request.prompt_token_ids[0]
        if first == POISON or (first == LATE_POISON and not run.fresh):
            raise Crash
        tokens, reason = reference(request)
        end = min(len(tokens), run.done + (1 if run.submit.prefill_only else faults.rng.randint(1, 3)))
        start = run.done
        if faults.rng.random() < faults.repeat:
            start = faults.rng.randint(0, run.done)
        if faults.rng.random() < faults.skip and end < len(tokens):
            start = end
            end += 1
        finished = end == len(tokens) and not (faults.rng.random() < faults.late_finish and run.done < len(tokens))
        deltas = []
        if faults.rng.random() < faults.stale and run.submit.attempt > 0:
            deltas.append(self._delta(run, start=0, tokens=[999], attempt=run.submit.attempt - 1))
        deltas.append(self._delta(run, start, tokens[start:end], run.submit.attempt, reason if finished else None))
        run.done, run.fresh = end, False
        if finished:
            self.running.pop(request.request_id)
        return deltas

    def _delta(
        self, run: Running, start: int, tokens: list[int], attempt: int, reason: FinishReason | None = None
    ) -> Delta:
        params = run.submit.request.params
        prompt = run.submit.request.prompt_token_ids
        return Delta(
            request_id=run.submit.request.request_id,
            attempt=attempt,
            index=start,
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [TokenLogprobs(token, -1.0, 1) for token in tokens],
            prompt_logprobs=[None] * len(prompt) if params.prompt_logprobs is not None and run.fresh else None,
            num_cached_tokens=10 * (attempt + 1),
            finish_reason=reason,
            timings=Timings(float(attempt), 0.0) if run.fresh else None,
        )


@dataclass
class TaskInstance:
    """The Instance port over a coroutine in this process."""

    link: Link[Up, Down]
    task: asyncio.Task[None]

    async def wait(self) -> str:
        await asyncio.wait((self.task,))
        if self.task.cancelled():
            return "the instance was killed"
        error = self.task.exception()
        return f"the instance crashed: {error!r}" if error else "the instance exited"

    def kill(self) -> None:
        self.task.cancel()

    async def stop(self, grace_s: float) -> None:
        self.link.close()
        await asyncio.wait((self.task,), timeout=grace_s)
        self.kill()
        await asyncio.wait((self.task,))


HELLO = Hello(instance_id="i", incarnation="", max_model_len=200, vocab_size=VOCABULARY, num_blocks=10, block_tokens=16)


class TaskLauncher:
    """Launches ScriptedInstances; `failures` makes the next starts fail: "launch", "failed" or "exit"."""

    def __init__(
        self,
        faults: Faults | None = None,
        hello: Hello = HELLO,
        *,
        capacity: int = 1024,
        weather: Weather | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.hello = hello
        self.capacity = capacity
        self.weather = weather or Weather()
        self.start_s = 0.5
        self.failures: list[str] = []
        self.launched_at: list[float] = []
        self.scripts: list[ScriptedInstance] = []
        self.instances: list[TaskInstance] = []

    async def launch(self) -> TaskInstance:
        self.launched_at.append(asyncio.get_running_loop().time())
        failure = self.failures.pop(0) if self.failures else None
        if failure == "launch":
            raise LaunchError("no such program")
        near, far = (LossyLink(end, self.weather) for end in memory_pair(self.capacity))
        main: Callable[[], Awaitable[None]]
        if failure is None:
            script = ScriptedInstance(far, self.faults, self.hello, self.start_s)
            self.scripts.append(script)
            main = script.main
        else:

            async def main() -> None:
                if failure == "failed":
                    far.send(Failed(error="out of memory"))
                far.close()

        instance = TaskInstance(near, asyncio.ensure_future(main()))
        self.instances.append(instance)
        return instance

    @property
    def running(self) -> bool:
        return any(not instance.task.done() for instance in self.instances)
