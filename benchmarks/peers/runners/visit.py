"""The part of a visit that all engines share. Runs inside an engine's own environment: standard library only.

A runner calls `visit(load)`, where `load(job)` gives a Session. Its only argument is the path of a job, a JSON object:

    started      wall clock at which the process was started (s)
    model        what the engine loads
    options      the engine's own options
    cores        compute threads to use
    figures      which of FIGURES to take, in this order
    output       tokens to make where many are made
    sizes        {"tokens": longest sequence, "batch": most sequences at once, "batch_tokens": longest of those,
                 "shared": tokens of their common prefix}
    prompts      path of the prompts: {"single": [[id, …], …], "long": …, "batch": …, "shared": …}

It writes JSON objects to standard output, one a line: {"version": text}, {"tokens": the first answer's ids} and
{"figure": name, "value": number} as figures are taken. Whatever else the engine prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any, Protocol

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Job:
    started: float
    model: str
    options: dict[str, Any]
    cores: int
    figures: list[str]
    output: int
    sizes: dict[str, int]
    prompts: str


class Session(Protocol):
    """A loaded engine. distribution: the package whose version is reported."""

    distribution: str

    def prepare(self, sequences: int, shared: int) -> None:
        """Get ready, outside of what is timed, for `sequences` prompts at once with `shared` tokens in common.
        Called before every `generate`."""

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        """Exactly `tokens` greedy tokens for each prompt; an end of text does not stop it."""


class Clock:
    """Times complete answers, and checks that they are complete."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def seconds(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> float:
        return self.answers(prompts, tokens, shared)[0]

    def answers(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> tuple[float, list[list[int]]]:
        self._session.prepare(len(prompts), shared)
        start = time.perf_counter()
        answers = self._session.generate(prompts, tokens, shared)
        seconds = time.perf_counter() - start
        lengths = [len(answer) for answer in answers]
        if lengths != [tokens] * len(prompts):
            raise SystemExit(f"expected {len(prompts)} answers of {tokens} tokens, got lengths {lengths}")
        return seconds, answers


def ttft_512(clock: Clock, prompts: dict[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    for prompt in prompts["single"][2:5]:
        yield "ttft_512_ms", 1e3 * clock.seconds([prompt], 1)


def ttft_4096(clock: Clock, prompts: dict[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    for prompt in prompts["long"]:
        yield "ttft_4096_ms", 1e3 * clock.seconds([prompt], 1)


def decode(clock: Clock, prompts: dict[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    """The first token of an answer costs as much as that of other prompts of the same length."""
    first, second, *others = prompts["single"][5:9]
    prefill = median([clock.seconds([first], 1), clock.seconds([second], 1)])
    for prompt in others:
        yield "decode_tokens_per_s", (job.output - 1) / (clock.seconds([prompt], job.output) - prefill)


def batch(clock: Clock, prompts: dict[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    seconds = clock.seconds(prompts["batch"], job.output)
    made = len(prompts["batch"]) * job.output
    yield "batch_output_tokens_per_s", made / seconds
    yield "batch_total_tokens_per_s", (made + sum(map(len, prompts["batch"]))) / seconds


def shared(clock: Clock, prompts: dict[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    seconds = clock.seconds(prompts["shared"], job.output, job.sizes["shared"])
    yield "shared_output_tokens_per_s", len(prompts["shared"]) * job.output / seconds


FIGURES: dict[str, Callable[[Clock, dict[str, Any], Job], Iterator[tuple[str, float]]]] = {
    "ttft_512": ttft_512,
    "decode": decode,
    "ttft_4096": ttft_4096,
    "batch": batch,
    "shared": shared,
}


def visit(load: Callable[[Job], Session]) -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = Job(**json.load(file))
    with open(job.prompts, encoding="utf-8") as file:
        prompts = json.load(file)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    session = load(job)
    clock = Clock(session)
    clock.answers([prompts["single"][0]], 1)
    tell(figure="cold_start_s", value=time.time() - job.started)
    tell(version=version(session.distribution))
    _, [answer] = clock.answers([prompts["single"][1]], WARM_UP_TOKENS)
    tell(tokens=[int(token) for token in answer])
    for name in job.figures:
        for figure, value in FIGURES[name](clock, prompts, job):
            tell(figure=figure, value=value)
    out.close()
    sys.stderr.flush()
    os._exit(0)  # everything is told: how an engine takes itself apart is not measured and must not fail the visit
