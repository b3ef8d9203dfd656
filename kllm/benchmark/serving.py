"""`kllm bench serve`: from a config to samples, to a run against a server, to a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kllm.benchmark.arrivals import poisson_arrivals, with_arrivals
from kllm.benchmark.client import CompletionClient, RequestRecord, first_model
from kllm.benchmark.config import LoadConfig
from kllm.benchmark.dataset import Sample, TokenSource, fitting, random_samples, shared_prefix_samples
from kllm.benchmark.load import run_load
from kllm.benchmark.statistics import Slo, summarise
from kllm.benchmark.traces import TRACE_DIR, read_trace, trace_samples

_WARM_UP_PROMPT = 64  # tokens, at most: enough to touch every path of a server, too little to matter


class NothingToSend(ValueError):
    """Every request is longer than the model allows."""


def make_samples(config: LoadConfig) -> list[Sample]:
    """The requests of a config with their times. Raises TraceError."""
    source = TokenSource(config.seed, config.vocab_size)
    if config.dataset == "random":
        samples = random_samples(
            config.num_prompts, config.input_len, config.output_len, source, config.length_spread, config.seed
        )
    elif config.dataset == "shared-prefix":
        samples = shared_prefix_samples(
            config.num_prompts, config.num_prefixes, config.prefix_len, config.input_len, config.output_len, source
        )
    else:
        rows = read_trace(config.dataset, config.num_prompts, config.trace_dir or TRACE_DIR)
        conversations = any(row.session is not None for row in rows)
        starts = _arrivals(config) if conversations else None
        samples = trace_samples(rows, source, config.scale, config.speed_up, starts)
        if conversations or config.request_rate is None:
            return samples
    return with_arrivals(samples, _arrivals(config))


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
    client = CompletionClient(config.url, model, config.api_key, config.timeout, options)
    try:
        await _warm_up(client, config)
        on_start(len(kept))
        records = await run_load(client, kept, config.max_concurrency, on_end)
    finally:
        await client.close()
    report = summarise(records, Slo(config.slo_ttft_ms, config.slo_tpot_ms))
    about = {"dataset": config.dataset, "model": model, "too_long": len(samples) - len(kept)}
    return about | report, records


async def _warm_up(client: CompletionClient, config: LoadConfig) -> None:
    source = TokenSource(config.seed + 1, config.vocab_size)
    for index in range(config.warm_up):
        sample = Sample(source.take(min(config.input_len, _WARM_UP_PROMPT), index), min(config.output_len, 8))
        (record,) = await run_load(client, [sample])
        if not record.ok:
            raise ConnectionError(f"the warm-up request failed ({record.error}): {record.detail}")


def _arrivals(config: LoadConfig) -> Iterator[float]:
    rate = float("inf") if config.request_rate is None else config.request_rate
    return poisson_arrivals(rate, config.seed)
