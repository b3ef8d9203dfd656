"""An instance that computes nothing: a process that speaks the gateway's protocol over the real link.

    python -m benchmarks.gateway.mock_instance ADDRESS SETTINGS        (SETTINGS: MockSettings as JSON)

The first token of a request leaves as soon as the request has come. Every later one leaves with a step, as an engine's
do: one message for all running requests. Steps are at whole multiples of step_s of the machine's monotonic clock, plus
a phase, so that a client on this machine knows when each token left. Output tokens are those of the prompt, from its
beginning, so that they make real text.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import uvloop

from kllm.cluster.cache_directory import prompt_hashes
from kllm.messages import (
    Abort,
    CacheChange,
    CacheDelta,
    CacheDump,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Hello,
    Submit,
    Up,
    WatchCache,
)
from kllm.request import Delta, Request, Timings
from kllm.transport.link import LinkClosed
from kllm.transport.zeromq import ZmqLink, dial

REPORT_S = 1.0
BLOCK_TOKENS = 16
NO_TIME = Timings(0.0, 0.0)


class MockSettings(msgspec.Struct, frozen=True):
    """step_s: between two tokens of a request. phase_s: of the steps. fingerprint: "" to report no cache."""

    step_s: float
    phase_s: float
    vocab_size: int
    fingerprint: str


class Running:
    """A request that has its first token."""

    __slots__ = ("attempt", "last", "num", "prompt", "request_id")

    def __init__(self, request: Request, attempt: int, num: int) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt_token_ids
        self.attempt = attempt
        self.num = num  # tokens so far
        self.last = request.params.max_tokens or 1  # tokens in all

    def next(self, timings: Timings | None = None) -> Delta:
        index = self.num
        self.num += 1
        return Delta(
            request_id=self.request_id,
            attempt=self.attempt,
            index=index,
            token_ids=[self.prompt[index % len(self.prompt)]],
            finish_reason="length" if self.num == self.last else None,
            timings=timings,
        )


class MockInstance:
    def __init__(self, link: ZmqLink[Down, Up], settings: MockSettings) -> None:
        self._link = link
        self._settings = settings
        self._running: dict[str, Running] = {}
        self._steps = 0
        self._reports = 0
        self._cache_sequence = 0
        self._watched = False
        self._draining = False

    async def run(self) -> None:
        self._link.send(
            Hello(
                instance_id=f"mock-{os.getpid()}",
                incarnation=f"mock-{os.getpid()}-{time.monotonic_ns()}",
                model="mock",
                max_model_len=1 << 20,
                vocab_size=self._settings.vocab_size,
                num_blocks=1 << 16,
                block_tokens=BLOCK_TOKENS,
                chunk_tokens=512,
                max_num_seqs=1024,
                fingerprint=self._settings.fingerprint,
            )
        )
        steps = Metronome(self._settings.step_s, self._settings.phase_s, self._step)
        reports = asyncio.create_task(self._report())
        try:
            while True:
                self._handle(await self._link.recv())
        except LinkClosed:
            pass
        finally:
            reports.cancel()
            steps.stop()

    def _handle(self, message: Down) -> None:
        match message:
            case Submit():
                running = Running(message.request, message.attempt, len(message.outputs))
                self._link.send(Deltas(items=[running.next(NO_TIME)]))
                if running.num < running.last:
                    self._running[running.request_id] = running
                if self._watched:
                    self._report_cached(message.request)
            case Abort():
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
            case WatchCache():
                self._watched = True
                self._link.send(CacheDump(sequence=self._cache_sequence, changes=[]))
            case Drain():
                self._draining = True
                self._step()

    def _report_cached(self, request: Request) -> None:
        """As an instance that has just computed the prompt."""
        hashes = prompt_hashes(request, self._settings.fingerprint, BLOCK_TOKENS)
        self._cache_sequence += 1
        changes = [CacheChange(1, True, hashes.astype(">u8").tobytes())]
        self._link.send(CacheDelta(sequence=self._cache_sequence, changes=changes))

    def _step(self) -> None:
        if self._running:
            self._steps += 1
            deltas = [running.next() for running in self._running.values()]
            self._link.send(Deltas(items=deltas))
            for delta in deltas:
                if delta.finish_reason is not None:
                    del self._running[delta.request_id]
        elif self._draining:
            self._draining = False
            self._link.send(Drained())

    async def _report(self) -> None:
        while True:
            self._reports += 1
            self._link.send(
                EngineLoad(
                    running=len(self._running),
                    steps=self._steps,
                    sequence=self._reports,
                    cache_sequence=self._cache_sequence,
                    progress={key: (running.attempt, running.num) for key, running in self._running.items()},
                )
            )
            await asyncio.sleep(REPORT_S)


class Metronome:
    """Calls on the loop's thread at every step. A thread keeps time: timers of event loops are a millisecond apart."""

    def __init__(self, step_s: float, phase_s: float, call: Callable[[], None]) -> None:
        self._step_ns, self._phase_ns = int(step_s * 1e9), int(phase_s * 1e9)
        self._call = call
        self._stopped = False
        self._beat = os.eventfd(0, os.EFD_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._beat, self._on_beat)
        threading.Thread(target=self._keep_time, daemon=True).start()

    def stop(self) -> None:
        self._stopped = True

    def _keep_time(self) -> None:
        while not self._stopped:
            now = time.monotonic_ns() - self._phase_ns
            time.sleep((self._step_ns - now % self._step_ns) / 1e9)
            os.eventfd_write(self._beat, 1)

    def _on_beat(self) -> None:
        os.eventfd_read(self._beat)
        self._call()


async def main(address: str, settings: MockSettings) -> None:
    await MockInstance(dial(address), settings).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=MockSettings)))
    os._exit(0)
