"""A mixed load for an engine core: short, long, shared-prefix, structured, sibling, aborted and impossible requests,
driven step by step with every invariant checked after every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kllm.engine.core import EngineCore
from kllm.engine.grammar import GrammarCompiler
from kllm.messages import Submit
from kllm.request import Delta, Request, SamplingParams, StructuredOutputs

KINDS = ("short", "long", "shared", "structured", "siblings", "aborted", "impossible")
WEIGHTS = (30, 15, 20, 10, 10, 10, 5)
GRAMMARS = (
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex=r"[a-f]{3,9}"),
    StructuredOutputs(choice=("yes", "no", "perhaps")),
    StructuredOutputs(json='{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
)


@dataclass(slots=True)
class Job:
    """A request, when it arrives (step), what it is, and after how many output tokens its client leaves."""

    request: Request
    kind: str
    arrival: int
    abort_after: int | None = None


@dataclass(slots=True)
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None  # "left" when the client left
    error: str | None = None
    num_ends: int = 0


@dataclass(slots=True)
class LoadSize:
    """Bounds of prompts and outputs in tokens; `over` is a prompt length that no pool of the test can hold."""

    vocab_size: int
    short: int
    long: int
    output: int
    over: int


def make_jobs(count: int, size: LoadSize, seed: int, *, per_step: float = 1.0) -> list[Job]:
    """`count` requests (siblings counted one each), arriving at random steps, `per_step` on average."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, size, size.long // 2) for _ in range(4)]
    jobs: list[Job] = []
    step = 0.0
    while len(jobs) < count:
        step += rng.expovariate(per_step)
        kind = rng.choices(KINDS, WEIGHTS)[0]
        for request in _requests(rng, kind, f"r{len(jobs)}", size, prefixes):
            leave = rng.randrange(0, size.output // 2) if kind == "aborted" else None
            jobs.append(Job(request, kind, int(step), leave))
    return jobs[:count]


def _tokens(rng: random.Random, size: LoadSize, count: int) -> list[int]:
    return [rng.randrange(min(256, size.vocab_size)) for _ in range(count)]


def _requests(
    rng: random.Random, kind: str, request_id: str, size: LoadSize, prefixes: list[list[int]]
) -> Iterator[Request]:
    if kind in ("long", "aborted"):
        prompt = _tokens(rng, size, rng.randrange(size.short, size.long))
    elif kind == "impossible":
        prompt = _tokens(rng, size, size.over)
    else:
        prompt = _tokens(rng, size, rng.randrange(1, size.short))
    if kind == "shared":
        prompt = rng.choice(prefixes) + prompt
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        seed=rng.randrange(2**32),
        max_tokens=rng.randrange(size.output // 2, size.output),
        ignore_eos=kind != "structured" and rng.random() < 0.5,
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=1 if rng.random() < 0.05 else None,
        structured_outputs=rng.choice(GRAMMARS) if kind == "structured" else None,
    )
    request = Request(request_id=request_id, prompt_token_ids=prompt, params=params)
    for index in range(3 if kind == "siblings" else 1):
        yield request.choice(index, params.seed or 0)


def run(core: EngineCore, compiler: GrammarCompiler, jobs: list[Job], *, check: bool = True) -> dict[str, Outcome]:
    """Drive all jobs to their ends. Raises AssertionError if an invariant breaks or the engine stops getting on."""
    outcomes = {job.request.request_id: Outcome() for job in jobs}
    leaving = {job.request.request_id: job.abort_after for job in jobs}
    coming = sorted(jobs, key=lambda job: job.arrival)
    steps = next_job = 0
    while next_job < len(coming) or core.num_unfinished or core.oldest is not None:
        while next_job < len(coming) and (coming[next_job].arrival <= steps or not core.num_unfinished):
            _take(core, outcomes, leaving, _submit(core, compiler, coming[next_job].request))
            next_job += 1
        _take(core, outcomes, leaving, core.step())
        if check:
            core.scheduler.check()
        steps += 1
        assert steps < 400 * len(jobs), "the engine does not get on"
    return outcomes


def _submit(core: EngineCore, compiler: GrammarCompiler, request: Request) -> list[Delta]:
    deltas = [core.add(Submit(request=request))]
    if request.params.structured_outputs is not None and deltas[0] is None:
        deltas.append(core.set_grammar(request.request_id, compiler.compile(request.params.structured_outputs)))
    return [delta for delta in deltas if delta is not None]


def _take(core: EngineCore, outcomes: dict[str, Outcome], leaving: dict[str, int | None], deltas: list[Delta]) -> None:
    for delta in deltas:
        outcome = outcomes[delta.request_id]
        assert outcome.finish is None, f"{delta.request_id} goes on after its end"
        assert delta.index == len(outcome.token_ids) or delta.finish_reason == "error"
        outcome.token_ids += delta.token_ids
        leave = leaving[delta.request_id]
        if delta.finish_reason is not None:
            outcome.finish, outcome.error = delta.finish_reason, delta.error
            outcome.num_ends += 1
        elif leave is not None and len(outcome.token_ids) > leave:
            core.abort([delta.request_id])
            outcome.finish = "left"
            outcome.num_ends += 1
