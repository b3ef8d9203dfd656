"""Open-loop load: every request is sent at its own absolute time, however slow the server is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from kllm.benchmark.client import CompletionClient, RequestRecord
from kllm.workload.sample import Sample


async def run_load(
    client: CompletionClient,
    samples: Sequence[Sample],
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send all samples; one record per sample, in their order.

    Send times are absolute (start + arrival), so that a late one does not delay those after it. With
    `max_concurrency` a request waits for a place first: record.sent_s - record.scheduled_s is that wait.
    """
    start = perf_counter()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    ended = [asyncio.Event() for _ in samples]
    records = [RequestRecord(i, s.input_len, s.arrival_s) for i, s in enumerate(samples)]

    async def run_one(index: int) -> None:
        sample, record = samples[index], records[index]
        if sample.after is not None:
            await ended[sample.after].wait()
            record.scheduled_s = records[sample.after].end_s + sample.arrival_s
        await asyncio.sleep(max(0.0, start + record.scheduled_s - perf_counter()))
        if places is None:
            await client.send(sample, record, start)
        else:
            async with places:
                await client.send(sample, record, start)
        ended[index].set()
        on_end(record)

    async with asyncio.TaskGroup() as group:
        for index in range(len(samples)):
            group.create_task(run_one(index))
    return records
