"""One engine's answers to the workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kllm.llm import LLM
from kllm.request import CompletionOutput, RequestOutput, SamplingParams
from kllm.verification import needles, structured
from kllm.verification.workload import Workload

PARTS = ("perplexity", "prefix cache", "continuations", "needles", "structured output")
_POSITIONS_PER_WINDOW = (0.37, 0.61, 0.83, 0.99)  # shares of a window; not at the edge of a block

OnPart = Callable[[str], None]


@dataclass
class Measurement:
    """logprobs and best: per window, of every token but the first: the log-probability (natural) the model gave it, and
    the token it found most likely. cached_nats: absolute changes of a log-probability when its context is read from the
    prefix cache, None without prefix caching; cached_tokens: how many tokens of context were. needles, structured:
    per item its name and whether it succeeded. seconds: by part."""

    logprobs: list[list[float]] = field(default_factory=list)
    best: list[list[int]] = field(default_factory=list)
    cached_nats: list[float] | None = None
    cached_tokens: int = 0
    continuations: list[list[int]] = field(default_factory=list)
    needles: dict[str, bool] = field(default_factory=dict)
    structured: dict[str, bool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def measure(llm: LLM, workload: Workload, *, prefix_caching: bool, on_part: OnPart = lambda part: None) -> Measurement:
    """All prompts of a part are given to the engine at once: how many run together is up to its options.

    on_part is called as each of PARTS begins. Raises InvalidRequest if a window is too long for the model."""
    result = Measurement()

    def score() -> None:
        result.logprobs, result.best = _score(llm, workload.windows)

    def score_again() -> None:
        if prefix_caching:
            result.cached_nats, result.cached_tokens = _score_cached(llm, workload, result.logprobs)

    def continue_greedily() -> None:
        outputs = _greedy(llm, workload.openings, workload.continuation_tokens, ignore_eos=True)
        result.continuations = [output.token_ids for output in outputs]

    def find_needles() -> None:
        asked = workload.needles_within(llm.max_model_len)
        outputs = _greedy(llm, [needle.prompt for needle in asked], needles.MAX_ANSWER_TOKENS)
        for needle, output in zip(asked, outputs, strict=True):
            result.needles[f"{needle.tokens} tokens, depth {needle.depth:.0%}"] = needle.found_in(output.text)

    def answer_in_json() -> None:
        params = [_greedy_params(structured.MAX_ANSWER_TOKENS, structured_outputs=task.spec) for task in workload.tasks]
        results = llm.generate([task.prompt for task in workload.tasks], params, progress=False)
        for task, answer in zip(workload.tasks, results, strict=True):
            result.structured[task.name] = task.accepts(answer.outputs[0].text)

    for part, run in zip(PARTS, (score, score_again, continue_greedily, find_needles, answer_in_json), strict=True):
        on_part(part)
        since = time.perf_counter()
        run()
        result.seconds[part] = round(time.perf_counter() - since, 2)
    return result


def _score(llm: LLM, windows: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[int]]]:
    outputs = llm.generate(windows, _greedy_params(1, prompt_logprobs=1, detokenize=False), progress=False)
    entries = [[entry for entry in output.prompt_logprobs or () if entry is not None] for output in outputs]
    return (
        [[entry.logprob for entry in window] for window in entries],
        [[entry.top[0][0] for entry in window] for window in entries],
    )


def _score_cached(llm: LLM, workload: Workload, scored: list[list[float]]) -> tuple[list[float], int]:
    """Ask for single tokens after the start of windows that were computed last, as the only ones allowed.

    Scoring a prompt never reads the prefix cache, so this is how cached KV shows. Log-probabilities are those before
    anything is forbidden. Returns (absolute changes in nats, tokens that came from the cache)."""
    chosen = range(len(workload.windows) - workload.cached_windows, len(workload.windows))
    probes = [(index, int(len(workload.windows[index]) * at)) for index in chosen for at in _POSITIONS_PER_WINDOW]
    results: list[RequestOutput] = llm.generate(
        [workload.windows[index][:at] for index, at in probes],
        [_greedy_params(1, logprobs=0, allowed_token_ids=(workload.windows[index][at],)) for index, at in probes],
        progress=False,
    )
    changes = []
    for (index, at), result in zip(probes, results, strict=True):
        entries = result.outputs[0].logprobs
        assert entries is not None, "they were asked for"
        changes.append(abs(entries[0].logprob - scored[index][at - 1]))
    return changes, sum(result.num_cached_tokens for result in results)


def _greedy(llm: LLM, prompts: Sequence[list[int]], tokens: int, *, ignore_eos: bool = False) -> list[CompletionOutput]:
    if not prompts:
        return []
    results = llm.generate(prompts, _greedy_params(tokens, ignore_eos=ignore_eos), progress=False)
    return [result.outputs[0] for result in results]


def _greedy_params(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
