"""GLM-5.2 in virtual time: a recorded load beside prompts of up to 900,000 tokens, with and without fairness.

The layout dp2tp8ep16 (two nodes of 8 H200) holds 1.48 M tokens of one request; tp8 holds 634 K on one node, which is no
room for such prompts. Waves of one, two and three long prompts come while the trace plays at 0.8 of saturation.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from kllm.simulation.config import SimulationConfig
from kllm.simulation.results import FleetResult, RequestOutcome
from kllm.simulation.run import simulate
from kllm.telemetry.statistics import distribution
from kllm.workload.sample import OWN, Sample

LAYOUT = "dp2tp8ep16"
LOAD = 0.8
TRACE_SECONDS = 900.0
WAVES = ((60.0, (750_000,)), (300.0, (600_000, 900_000)), (600.0, (600_000, 750_000, 900_000)))  # (second, prompts)
LONG_OUTPUT = 400
LATE_S = 60.0
MOST_STRETCH = 1.15  # completion of the long ones, over that of first come, first served
FIRST_KEY = 10_000_000  # of the long prompts' tokens: no request of the trace has it


def long_prompts() -> list[Sample]:
    lengths = [(second, length) for second, wave in WAVES for length in wave]
    return [
        Sample((((OWN, FIRST_KEY + place), length),), LONG_OUTPUT, second)
        for place, (second, length) in enumerate(lengths)
    ]


def run(policy: str, progress: Progress, *, with_long: bool = True, **changes: Any) -> FleetResult:
    knobs = {"limit_seconds": TRACE_SECONDS, "instances": 1, "layout": LAYOUT, "load": LOAD, "start_s": 1.0}
    config = SimulationConfig.model_validate(knobs | {"scheduling_policy": policy} | changes)
    task = progress.add_task(f"GLM-5.2, {policy}{'' if with_long else ', no long prompts'}", total=None)
    result = simulate(
        config,
        lambda now, done, total: progress.update(task, completed=done, total=total),
        extra=long_prompts() if with_long else (),
    )
    progress.remove_task(task)
    return result


def figures(result: FleetResult, num_long: int) -> dict[str, Any]:
    """num_long: how many of the last outcomes are the long prompts."""
    split = len(result.outcomes) - num_long
    trace, long = result.outcomes[:split], result.outcomes[split:]
    waits = [outcome.ttft_s for outcome in trace if outcome.ttft_s is not None]
    spread = distribution(waits) or {}
    return {
        "requests": len(trace),
        "share_over_60_s": round(sum(wait > LATE_S for wait in waits) / len(waits), 4),
        "ttft_s": {name: round(value, 3) for name, value in spread.items()},
        "long_completion_s": [round(_completion(outcome), 1) for outcome in long],
        "yields": result.yields,
        "most_yields": result.most_yields,
        "preemptions": result.preemptions,
    }


def stretch(before: Sequence[RequestOutcome], after: Sequence[RequestOutcome]) -> float:
    """Completion time of the same requests, after over before: the mean ratio."""
    return statistics.fmean(_completion(b) / _completion(a) for a, b in zip(before, after, strict=True))


def _completion(outcome: RequestOutcome) -> float:
    return outcome.end_s - outcome.arrival_s


def measure(progress: Progress) -> dict[str, Any]:
    num = len(long_prompts())
    runs = {policy: run(policy, progress) for policy in ("fcfs", "fair")}
    return {
        "layout": LAYOUT,
        "load": LOAD,
        "without_long": figures(run("fcfs", progress, with_long=False), 0),
        **{policy: figures(result, num) for policy, result in runs.items()},
        "long_completion_ratio": round(stretch(runs["fcfs"].outcomes[-num:], runs["fair"].outcomes[-num:]), 3),
    }
