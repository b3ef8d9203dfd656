"""Where the time of a step goes: the native phases of all layers, the head, the sampler and the Python around them.

    python benchmarks/step_profile.py [--model smollm2] [--batch 1,8,32] [--prefill 512,4096] [--set FIELD=VALUE ...]

Rows are milliseconds a step, medians over the steps of a run; --set takes fields of EngineConfig.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from kllm import LLM, SamplingParams

CONTEXT = 512
NEW_TOKENS = 48


class StepClock:
    """Times a runner's steps and their parts from outside. parts: milliseconds of every step, by name."""

    def __init__(self, runner: Any) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}
        self._native = runner.model._stack.native
        self._native.timing = True
        execute = runner.execute
        runner.model.logits = self._timed("head", runner.model.logits)
        runner.model.forward = self._timed("layers", runner.model.forward)
        runner.sampler.sample = self._timed("sampler", runner.sampler.sample)

        def timed_execute(plan: Any, late: Any) -> Any:
            self._parts = {}
            self._native.take_seconds()
            began = time.perf_counter()
            result = execute(plan, late)
            total = 1e3 * (time.perf_counter() - began)
            phases = {name: 1e3 * seconds for name, seconds in self._native.take_seconds().items()}
            known = sum(self._parts.values())
            between = self._parts["layers"] - sum(phases.values())
            parts = {**phases, "between phases": between, "head": self._parts.get("head", 0.0)}
            parts |= {"sampler": self._parts.get("sampler", 0.0), "batch and results": total - known, "step": total}
            self.steps.append(parts)
            return result

        runner.execute = timed_execute

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self._parts[name] = self._parts.get(name, 0.0) + 1e3 * (time.perf_counter() - began)
            return result

        return timed


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def profile(llm: LLM, clock: StepClock, batches: list[int], prefills: list[int]) -> dict[str, dict[str, float]]:
    rng = random.Random(0)
    vocab = llm._engine.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab // 2) for _ in range(length)] for _ in range(count)]

    results = {}
    for batch in batches:
        clock.steps.clear()
        began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        llm.generate(prompts(batch, CONTEXT), params, progress=False)
        decode = clock.steps[-NEW_TOKENS // 2 :]
        results[f"decode, batch {batch}"] = medians(decode)
        results[f"decode, batch {batch}"]["run seconds"] = time.perf_counter() - began
    for length in prefills:
        runs = []
        for _ in range(3):
            clock.steps.clear()
            llm.generate(prompts(1, length), SamplingParams(temperature=0.0, max_tokens=1), progress=False)
            runs.append({name: sum(step[name] for step in clock.steps) for name in clock.steps[0]})
        results[f"prefill {length}"] = medians(runs)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prefill", default="512,4096")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fields = dict(item.split("=", 1) for item in options.set)
    llm = LLM(options.model, kernels="cpu", num_kv_blocks=2048, **fields)
    clock = StepClock(llm._core.executor._runner)
    sizes = [[int(part) for part in text.split(",") if part] for text in (options.batch, options.prefill)]
    results = profile(llm, clock, *sizes)
    llm.close()
    if options.json:
        print(json.dumps(results, indent=2))
        return
    table = Table("ms a step", *results)
    for name in next(iter(results.values())):
        table.add_row(name, *(f"{column[name]:.2f}" if name in column else "" for column in results.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
