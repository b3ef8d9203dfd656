"""From request records to the figures of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kllm.benchmark.client import RequestRecord
from kllm.telemetry.statistics import Slo, distribution


def distribution_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95 and p99 in milliseconds; None of nothing."""
    figures = distribution(seconds)
    return None if figures is None else {name: round(value * 1e3, 3) for name, value in figures.items()}


def summarise(records: Sequence[RequestRecord], slo: Slo) -> dict[str, Any]:
    """The report of a run as plain data. Latencies are of successful requests; goodput is a share of all of them."""
    good = [record for record in records if record.ok]
    duration = max((record.end_s for record in records), default=0.0) - min(
        (record.sent_s for record in records), default=0.0
    )
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)

    def per_second(amount: float) -> float:
        return round(amount / duration, 3) if duration > 0 else 0.0

    report: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "duration_s": round(duration, 3),
        "requests_per_s": per_second(len(good)),
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": output,
        "output_tokens_per_s": per_second(output),
        "total_tokens_per_s": per_second(prompt + output),
        "ttft_ms": distribution_ms([r.ttft_s for r in good if r.ttft_s is not None]),
        "tpot_ms": distribution_ms([r.tpot_s for r in good if r.tpot_s is not None]),
        "itl_ms": distribution_ms([gap for r in good for gap in r.itl_s]),
        "e2e_ms": distribution_ms([r.e2e_s for r in good]),
        "send_delay_ms": distribution_ms([r.sent_s - r.scheduled_s for r in records]),
    }
    if slo.stated:
        within = sum(record.ok and slo.met_by(record.ttft_s, record.tpot_s) for record in records)
        report["goodput"] = {
            "slo_ttft_ms": slo.ttft_ms,
            "slo_tpot_ms": slo.tpot_ms,
            "share": round(within / len(records), 4) if records else 0.0,
            "requests_per_s": per_second(within),
        }
    return report
