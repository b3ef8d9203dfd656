"""From a run's outcomes and samples to figures: the JSON of `kllm simulate`, and what its table and page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, get_args

import msgspec

from kllm.simulation.results import Ending, FleetResult, InstanceSample, RequestOutcome
from kllm.telemetry.statistics import PERCENTILES, Slo, distribution, prompt_class

_DISTRIBUTION = ("mean", *(f"p{percent}" for percent in PERCENTILES))
_MOST_REASONS = 10
TIERS = ("l1", "l2", "l3")
_DIGITS = 6  # significant digits: enough for every reader, and no noise of the last bits in a file


def summarise(result: FleetResult, slo: Slo) -> dict[str, Any]:
    """The report of a run as plain data, ready for JSON. Times are seconds, shares 0 to 1, money is dollars.

    Latencies, tokens and hit rates are of completed requests; a distribution of nothing has None for every figure.
    Rates are per second from the first arrival to the last ending; cost is that of all GPUs over the whole run.
    """
    done = [outcome for outcome in result.outcomes if outcome.ending == "completed"]
    within = sum(slo.met_by(outcome.ttft_s, outcome.tpot_s) for outcome in done)
    duration = _duration(result.outcomes)
    instances = instance_figures(result.samples)
    return {
        "decision_hash": result.decision_hash,
        "requests": len(result.outcomes),
        "completed": len(done),
        "endings": _endings(result.outcomes),
        "reasons": _reasons(result.outcomes),
        "retried": sum(outcome.attempts > 1 for outcome in result.outcomes),
        "ttft_s": _distribution([outcome.ttft_s for outcome in done if outcome.ttft_s is not None]),
        "prompt_classes": _prompt_classes(done, result.chunk_tokens),
        "tpot_s": _distribution([outcome.tpot_s for outcome in done if outcome.tpot_s is not None]),
        "e2e_s": _distribution([outcome.end_s - outcome.arrival_s for outcome in done]),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "share": _share(within, len(result.outcomes))},
        "goodput_rps": _share(within, duration),
        "requests_per_s": _share(len(done), duration),
        "hit_rate": _hit_rate(done, result.hits),
        "tiers": _tiers(result),
        **_tokens(done, duration, result.gpus),
        "utilisation": _mean([figures["busy"] for figures in instances]),
        "load": result.load,
        "trace_load": result.trace_load,
        "gpus": result.gpus,
        "cost": _cost(result, done),
        "steps": result.steps,
        "preemptions": result.preemptions,
        "yields": result.yields,
        "most_yields": result.most_yields,
        "quota_tokens": result.quota_tokens,
        "overtakes": result.overtakes,
        "restarts": result.restarts,
        "duration_s": _rounded(duration),
        "simulated_s": _rounded(result.simulated_s),
        "wall_s": _rounded(result.wall_s),
        "instances": instances,
        "settings": result.settings,
        "notes": result.notes,
        "faults": result.faults,
    }


def instance_figures(samples: Sequence[InstanceSample]) -> list[dict[str, Any]]:
    """One row per instance, by id: means over time (each sample counts for the time since the one before), and peaks.

    busy and up are shares of the whole run; running, waiting and kv_usage are means over the time the instance was up.
    step_rows and step_tokens are means over the time it was busy.
    """
    ordered = sorted(samples, key=lambda sample: (sample.instance, sample.time_s))
    return [_figures(instance, list(group)) for instance, group in groupby(ordered, key=lambda one: one.instance)]


def _figures(instance: int, samples: list[InstanceSample]) -> dict[str, Any]:
    spans = _spans(samples)
    up = [(sample, span) for sample, span in zip(samples, spans, strict=True) if sample.up]
    up_s = sum(span for _, span in up)
    busy_s = sum(sample.busy * span for sample, span in up)
    return {
        "instance": instance,
        "up": _share(up_s, sum(spans)),
        "busy": _share(busy_s, sum(spans)),
        "running": _share(sum(sample.running * span for sample, span in up), up_s),
        "running_peak": max((sample.running for sample in samples), default=0),
        "waiting": _share(sum(sample.waiting * span for sample, span in up), up_s),
        "waiting_peak": max((sample.waiting for sample in samples), default=0),
        "kv_usage": _share(sum(sample.kv_usage * span for sample, span in up), up_s),
        "kv_usage_peak": _rounded(max((sample.kv_usage for sample in samples), default=0.0)),
        "step_rows": _share(sum(sample.step_rows * sample.busy * span for sample, span in up), busy_s),
        "step_tokens": _share(sum(sample.step_tokens * sample.busy * span for sample, span in up), busy_s),
    }


def _spans(samples: list[InstanceSample]) -> list[float]:
    """Seconds that each sample stands for: since the one before, or since the start of the run."""
    times = [0.0, *(sample.time_s for sample in samples)]
    spans = [later - earlier for earlier, later in pairwise(times)]
    return spans if sum(spans) > 0 else [1.0] * len(samples)  # only one sample, at the start


def _prompt_classes(done: Sequence[RequestOutcome], chunk_tokens: int) -> dict[str, dict[str, Any]]:
    """Requests and TTFT of short prompts (at most a chunk) and long ones, of those classes that there are."""
    times: dict[str, list[float]] = {"short": [], "long": []}
    for outcome in done:
        if outcome.ttft_s is not None:
            times[prompt_class(outcome.prompt_tokens, chunk_tokens)].append(outcome.ttft_s)
    return {
        name: {"requests": len(values), "ttft_s": _distribution(values)} for name, values in times.items() if values
    }


def _endings(outcomes: Sequence[RequestOutcome]) -> dict[str, int]:
    counts = Counter(outcome.ending for outcome in outcomes)
    return {ending: counts[ending] for ending in get_args(Ending)}


def _reasons(outcomes: Sequence[RequestOutcome]) -> list[dict[str, Any]]:
    """Why requests did not complete, the most frequent reasons first."""
    failed = [(outcome.ending, outcome.detail) for outcome in outcomes if outcome.ending != "completed"]
    return [
        {"ending": ending, "detail": detail, "requests": count}
        for (ending, detail), count in Counter(failed).most_common(_MOST_REASONS)
        if detail
    ]


def _tokens(done: Sequence[RequestOutcome], duration: float, gpus: int) -> dict[str, Any]:
    prompt = sum(outcome.prompt_tokens for outcome in done)
    output = sum(outcome.output_tokens for outcome in done)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": sum(outcome.cached_tokens for outcome in done),
        "output_tokens": output,
        "output_tokens_per_s": _share(output, duration),
        "total_tokens_per_s": _share(prompt + output, duration),
        "output_tokens_per_s_per_gpu": _share(output, duration * gpus),
    }


def _hit_rate(done: Sequence[RequestOutcome], hits: tuple[int, int, int]) -> dict[str, float]:
    """Share of prompt tokens found in each tier. A client is told what was cached, not where: its tokens are shared out
    as those that all requests found were, which is the same unless requests were resubmitted."""
    prompt = sum(outcome.prompt_tokens for outcome in done)
    cached = sum(outcome.cached_tokens for outcome in done)
    if not sum(hits):
        return {"l1": _share(cached, prompt), "l2": 0.0, "l3": 0.0}
    return {tier: _share(cached * part, prompt * sum(hits)) for tier, part in zip(TIERS, hits, strict=True)}


def _tiers(result: FleetResult) -> dict[str, float] | None:
    """TierCounts of the fleet; None where there are no lower tiers."""
    if result.tiers is None:
        return None
    counts = msgspec.structs.asdict(result.tiers) | {"wasted": result.wasted}
    return {name: _rounded(count) if isinstance(count, float) else count for name, count in counts.items()}


def _cost(result: FleetResult, done: Sequence[RequestOutcome]) -> dict[str, float | None] | None:
    """Dollars; None where the price of a GPU is not known. Per million tokens is None where no request completed."""
    if result.cost_per_gpu_hour is None:
        return None
    total = result.gpus * result.cost_per_gpu_hour * result.simulated_s / 3600
    output = sum(outcome.output_tokens for outcome in done)
    tokens = output + sum(outcome.prompt_tokens for outcome in done)
    return {
        "per_gpu_hour": result.cost_per_gpu_hour,
        "total": _rounded(total),
        "per_million_output_tokens": _rounded(total / output * 1e6) if output else None,
        "per_million_tokens": _rounded(total / tokens * 1e6) if tokens else None,
    }


def _duration(outcomes: Sequence[RequestOutcome]) -> float:
    if not outcomes:
        return 0.0
    return max(outcome.end_s for outcome in outcomes) - min(outcome.arrival_s for outcome in outcomes)


def _distribution(seconds: list[float]) -> dict[str, float | None]:
    figures = distribution(seconds)
    if figures is None:
        return dict.fromkeys(_DISTRIBUTION)
    return {name: _rounded(value) for name, value in figures.items()}


def _mean(values: list[float]) -> float:
    return _share(sum(values), len(values))


def _share(part: float, whole: float) -> float:
    return _rounded(part / whole) if whole > 0 else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
