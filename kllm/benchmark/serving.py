"""`kllm bench serve`: from a config to samples, to a run against a server, to a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kllm.benchmark.client import CompletionClient, RequestRecord, first_model
from kllm.benchmark.config import LoadConfig
from kllm.benchmark.load import run_load
from kllm.benchmark.statistics import summarise
from kllm.telemetry.statistics import Slo
from kllm.workload.config import SYNTHETIC
from kllm.workload.generators import with_arrivals
from kllm.workload.offered import arrival_times, synthetic_samples
from kllm.workload.replay import describe_scaling, trace_samples
from kllm.workload.sample import WARM_UP, Sample, TokenSource, fitting
from kllm.workload.traces import TRACE_DIR, read_trace

_WARM_UP_PROMPT = 64  # tokens, at most: enough to touch every path of a server, too little to matter


class NothingToSend(ValueError):
    """Every request is longer than the model allows."""


def make_samples(config: LoadConfig) -> list[Sample]:
    """The requests of a config with their times. Raises TraceError."""
    if config.dataset in SYNTHETIC:
        return with_arrivals(synthetic_samples(config.dataset, config), arrival_times(config))
    rows = read_trace(config.dataset, limit_requests=config.num_prompts, folder=config.trace_dir or TRACE_DIR)
    conversations = any(row.session is not None for row in rows)
    starts = arrival_times(config) if conversations else None
    samples = trace_samples(rows, config.scale, config.speed_up, starts)
    if conversations or config.request_rate is None:
        return samples
    return with_arrivals(samples, arrival_times(config))


async def run_benchmark(
    config: LoadConfig,
    samples: list[Sample],
    on_start: Callable[[int], None] = lambda total: None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """(report, one record per request sent). Requests that the model is too short for are left out and counted.

    on_start gets the number of requests when the measured part begins; on_end each one's record.
    Raises ConnectionError when no server answers or a warm-up request fails, NothingToSend.
    """
    card = await first_model(config.url, config.api_key)
    model = config.model or str(card["id"])
    kept = fitting(samples, card.get("max_model_len"))
    if not kept:
        raise NothingToSend(f"no request fits the model's {card.get('max_model_len')} tokens; a smaller scale may help")
    options = {"temperature": config.temperature}
    source = TokenSource(config.seed, config.vocab_size)
    client = CompletionClient(config.url, model, config.api_key, config.timeout, options, source.prompt)
    try:
        await _warm_up(client, config)
        on_start(len(kept))
        records = await run_load(client, kept, config.max_concurrency, on_end)
    finally:
        await client.close()
    report = summarise(records, Slo(config.slo_ttft_ms, config.slo_tpot_ms))
    about = {
        "dataset": config.dataset,
        "scaling": _scaling(config, samples),
        "model": model,
        "too_long": len(samples) - len(kept),
    }
    return about | report, records


def _scaling(config: LoadConfig, samples: list[Sample]) -> list[str]:
    """What was changed about a trace, in sentences."""
    if config.dataset in SYNTHETIC:
        return []
    own_times = config.request_rate is None
    conversations = any(sample.after is not None for sample in samples)
    sentences = describe_scaling(config.scale, config.speed_up if own_times or conversations else 1.0)
    if not own_times:
        what = "conversations start" if conversations else "requests come"
        sentences.append(f"{what} as a {config.arrivals} process of {config.request_rate:g} a second")
    return sentences


async def _warm_up(client: CompletionClient, config: LoadConfig) -> None:
    for index in range(config.warm_up):
        length = min(config.input_len, _WARM_UP_PROMPT)
        sample = Sample((((WARM_UP, index), length),), min(config.output_len, 8))
        (record,) = await run_load(client, [sample])
        if not record.ok:
            raise ConnectionError(f"the warm-up request failed ({record.error}): {record.detail}")
