"""One load on one server, and what it showed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gateway.client import Answer, Client, health
from benchmarks.gateway.processes import Served
from benchmarks.simulation_accuracy.real import ServerFailed

CONNECTIONS = 64
PROBE_S = 0.05  # between two questions that tell how long the server's event loop makes others wait
SETTLE_S = 0.5  # the first answers are not counted: connections are opened, pages are touched


async def measure_load(
    served: Served, messages: Sequence[bytes], tokens: int, rate: float, seconds: float, period_s: float | None
) -> dict[str, Any]:
    """Poisson arrivals at `rate` per second. period_s: of the mocks' steps together; None where nobody steps.

    Raises ServerFailed if an answer is wrong."""
    client = Client(served.host, served.port)
    try:
        await client.connect(CONNECTIONS)
        probes: list[float] = []
        probing = asyncio.create_task(_probe(served, client, probes)) if period_s is not None else None
        cpu, own, start = served.cpu_s(), time.process_time(), time.monotonic()
        answers = await client.poisson(messages, rate, seconds, random.Random(17))
        took = time.monotonic() - start
        cpu, own = served.cpu_s() - cpu, time.process_time() - own
        if probing is not None:
            probing.cancel()
    finally:
        client.close()
    good = _good(answers, tokens)
    counted = [answer for answer in good if answer.due >= start + SETTLE_S]
    ttfts = [answer.ttft_s * 1e3 for answer in counted]
    figures = {
        "rate": rate,
        "requests": len(good),
        "completed_rps": round(len(good) / took, 1),
        "ttft_p50_ms": _percentile(ttfts, 50),
        "ttft_p99_ms": _percentile(ttfts, 99),
        "server_cores": round(cpu / took, 3),
        "cpu_us_per_request": round(cpu / len(good) * 1e6, 1),
        "client_cores": round(own / took, 3),
        "client_late_p99_ms": _percentile([(answer.sent - answer.due) * 1e3 for answer in counted], 99),
    }
    if period_s is not None:
        late = [when % period_s * 1e3 for answer in counted for when in answer.arrivals[1:]]
        loop_p99 = _percentile(probes, 99)
        told = loop_p99 is not None and loop_p99 < period_s * 1e3  # what is later than a period would look early
        figures |= {
            "token_p50_ms": _percentile(late, 50) if told else None,
            "token_p99_ms": _percentile(late, 99) if told else None,
            "loop_p50_ms": _percentile(probes, 50),
            "loop_p99_ms": loop_p99,
        }
    return figures


async def _probe(served: Served, client: Client, waits: list[float]) -> None:
    """Milliseconds that /health takes, again and again: nothing but the event loop's turn."""
    message = health(served.host, served.port)
    while True:
        answer = await client.fetch(message, time.monotonic())
        waits.append((answer.end - answer.sent) * 1e3)
        await asyncio.sleep(PROBE_S)


def _good(answers: Sequence[Answer | BaseException], tokens: int) -> list[Answer]:
    good: list[Answer] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise ServerFailed(f"a request failed: {answer!r}")
        problem = answer.problem(tokens)
        if problem is not None:
            raise ServerFailed(f"an answer is wrong: {problem}")
        good.append(answer)
    return good


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
