"""Running the gate: plain first, then each variant in an engine of its own, one after the other."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Literal

import msgspec
import torch

import kllm
from kllm.hub import resolve
from kllm.hub.gguf import GGUFFile
from kllm.hub.source import ModelSource
from kllm.llm import LLM
from kllm.tokenization.tokenizer import load_tokenizer
from kllm.verification import texts
from kllm.verification.config import VerifyConfig
from kllm.verification.judgement import Check, Figures, compare, judge, judge_alone
from kllm.verification.measurement import Measurement, measure
from kllm.verification.variants import PLAIN, VARIANTS, Variant
from kllm.verification.workload import FULL, QUICK, Scale, Workload, make_workload

_BLOCK_TOKENS = 16

OnPart = Callable[[str, str], None]
OnOutcome = Callable[["Verification"], None]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """skipped: it cannot run here, `reason` says why; required: it was asked for by name, so skipping it is a failure.
    answers: by item, whether a needle was found or an answer kept to its schema."""

    name: str
    about: str
    options: dict[str, Any]
    status: Literal["passed", "failed", "skipped"]
    required: bool = False
    reason: str = ""
    figures: Figures | None = None
    checks: list[Check] = []
    answers: dict[str, bool] = {}
    seconds: dict[str, float] = {}

    @property
    def acceptable(self) -> bool:
        return self.status == "passed" or (self.status == "skipped" and not self.required)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """A run's result. plain has no limits but that structured output is valid. waiting: variants that are yet to run;
    nothing has passed before all have."""

    model: str
    text: str
    scored_tokens: int
    window: int
    versions: dict[str, str]
    plain: Outcome
    variants: list[Outcome] = []
    waiting: list[str] = []

    @property
    def outcomes(self) -> list[Outcome]:
        """In the order they ran, plain first."""
        return [self.plain, *self.variants]

    @property
    def passed(self) -> bool:
        return not self.waiting and all(outcome.acceptable for outcome in self.outcomes)

    def followed_by(self, outcome: Outcome) -> Verification:
        return msgspec.structs.replace(self, variants=[*self.variants, outcome], waiting=self.waiting[1:])


def chosen_variants(config: VerifyConfig) -> list[Variant]:
    if config.variants:
        return [VARIANTS[name] for name in config.variants]
    return [variant for variant in VARIANTS.values() if variant.quick or not config.quick]


def verify(
    model: str,
    config: VerifyConfig,
    on_part: OnPart = lambda variant, part: None,
    on_outcome: OnOutcome = lambda so_far: None,
) -> Verification:
    """on_part(variant, part) is called as each part of each variant begins, on_outcome(result so far) as each variant
    ends, plain included. Raises what loading the model plainly raises (ModelSourceError, WeightError, ValueError) and
    InvalidRequest for a window longer than the model."""
    scale: Scale = QUICK if config.quick else FULL
    if config.tokens is not None:
        scale = replace(scale, tokens=config.tokens)
    source = resolve(model)
    workload = make_workload(load_tokenizer(source), scale, config.window)
    runner = _Runner(model, workload, config.threads, on_part)
    chosen = chosen_variants(config)
    plain = runner.run("plain", PLAIN)
    plain_figures = compare(plain, plain)
    result = Verification(
        model=model,
        text=texts.SOURCE,
        scored_tokens=len(texts.flatten(plain.logprobs)),
        window=len(workload.windows[0]),
        versions={"kllm": kllm.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        plain=_judged("plain", "the plain path", PLAIN, plain, plain_figures, judge_alone(plain_figures)),
        waiting=[variant.name for variant in chosen],
    )
    on_outcome(result)
    for variant in chosen:
        outcome = _outcome(variant, runner, source, plain, plain_figures)
        result = result.followed_by(msgspec.structs.replace(outcome, required=bool(config.variants)))
        on_outcome(result)
    return result


def _outcome(
    variant: Variant, runner: _Runner, source: ModelSource, plain: Measurement, plain_figures: Figures
) -> Outcome:
    options = variant.engine_options
    reason = "the checkpoint's weights are not quantised" if variant.as_shipped and not is_quantised(source) else ""
    if not reason:
        try:
            measured = runner.run(variant.name, options)
        except Unavailable as error:
            reason = str(error)
    if reason:
        return Outcome(name=variant.name, about=variant.about, options=options, status="skipped", reason=reason)
    figures = compare(measured, plain)
    return _judged(
        variant.name, variant.about, options, measured, figures, judge(figures, plain_figures, variant.limits)
    )


def _judged(
    name: str,
    about: str,
    options: dict[str, Any],
    measured: Measurement,
    figures: Figures,
    checks: Sequence[Check],
) -> Outcome:
    return Outcome(
        name=name,
        about=about,
        options=options,
        status="passed" if all(check.passed for check in checks) else "failed",
        figures=figures,
        checks=list(checks),
        answers={**measured.needles, **measured.structured},
        seconds=measured.seconds,
    )


class Unavailable(Exception):
    """An engine with these options cannot be made on this machine, of this model."""


class _Runner:
    """Makes an engine, measures it and lets it go before the next."""

    def __init__(self, model: str, workload: Workload, threads: int | None, on_part: OnPart) -> None:
        self._model = model
        self._workload = workload
        self._on_part = on_part
        blocks = -(-workload.kv_tokens // _BLOCK_TOKENS) + 1
        self._shared = {"threads": threads, "block_size": _BLOCK_TOKENS, "num_kv_blocks": blocks}

    def run(self, name: str, options: dict[str, Any]) -> Measurement:
        """Raises Unavailable if a variant's engine is refused, with the refusal's words; plain's errors are the
        user's."""
        self._on_part(name, "load")
        try:
            llm = LLM(self._model, **options, **self._shared)
        except ValueError as error:
            if options is PLAIN:
                raise
            raise Unavailable(" ".join(str(error).split())) from error
        with closing(llm):
            measured = measure(
                llm,
                self._workload,
                prefix_caching=options["enable_prefix_caching"],
                on_part=lambda part: self._on_part(name, part),
            )
        del llm
        gc.collect()  # weights and KV cache go before the next engine takes as much again
        return measured


def is_quantised(source: ModelSource) -> bool:
    """Whether the checkpoint keeps weights in blocks that operators may use as they are."""
    return source.kind == "gguf" and any(info.type.block > 1 for info in GGUFFile(source.path).tensors.values())


def as_json(result: Verification) -> dict[str, Any]:
    """Plain data, with what the properties say."""
    data: dict[str, Any] = msgspec.to_builtins(result)
    for outcome, plain_data in zip(result.outcomes, [data["plain"], *data["variants"]], strict=True):
        plain_data["checks"] = [{**asdict(check), "passed": check.passed} for check in outcome.checks]
    return {"passed": result.passed, **data}
