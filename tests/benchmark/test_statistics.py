"""Percentiles, latencies and goodput against plain definitions."""

from __future__ import annotations

import random
import statistics

import pytest

from kllm.benchmark.client import RequestRecord
from kllm.benchmark.statistics import distribution_ms, summarise
from kllm.telemetry.statistics import Slo


def test_distribution_of_nothing_is_none():
    assert distribution_ms([]) is None


def make_records(count: int, seed: int) -> list[RequestRecord]:
    rng = random.Random(seed)
    records = []
    for index in range(count):
        sent = rng.uniform(0, 10)
        chunks = [sent + rng.uniform(0.01, 0.5)]
        for _ in range(rng.randrange(0, 12)):
            chunks.append(chunks[-1] + rng.uniform(0.001, 0.05))
        record = RequestRecord(index, rng.randrange(1, 100), sent, sent, chunks[-1] + 0.001, chunks, len(chunks))
        if rng.random() < 0.2:
            record.error = rng.choice(["http 429", "timeout"])
        records.append(record)
    return records


def test_goodput_matches_its_definition():
    records = make_records(300, seed=1)
    report = summarise(records, Slo(ttft_ms=250, tpot_ms=25))
    within = 0
    for record in records:
        ttft = record.chunk_s[0] - record.sent_s
        gaps = [b - a for a, b in zip(record.chunk_s, record.chunk_s[1:], strict=False)]
        slow = bool(gaps) and statistics.fmean(gaps) > 0.025
        within += record.error is None and ttft <= 0.25 and not slow
    duration = max(r.end_s for r in records) - min(r.sent_s for r in records)
    assert 0 < within < 300
    assert report["goodput"]["share"] == pytest.approx(within / 300, abs=1e-4)
    assert report["goodput"]["requests_per_s"] == pytest.approx(within / duration, abs=1e-3)


def test_report_counts_what_completed():
    records = make_records(200, seed=2)
    report = summarise(records, Slo())
    good = [r for r in records if r.error is None]
    duration = max(r.end_s for r in records) - min(r.sent_s for r in records)
    assert report["completed"] == len(good)
    assert sum(report["errors"].values()) == 200 - len(good)
    assert report["output_tokens_per_s"] == pytest.approx(sum(r.output_tokens for r in good) / duration, abs=1e-3)
    assert report["e2e_ms"]["mean"] == pytest.approx(statistics.fmean(r.end_s - r.sent_s for r in good) * 1e3, abs=1e-2)
    assert report["ttft_ms"]["p50"] == pytest.approx(
        statistics.median(r.chunk_s[0] - r.sent_s for r in good) * 1e3, abs=1e-2
    )
    assert "goodput" not in report


def test_one_token_has_no_time_per_token_and_meets_its_limit():
    record = RequestRecord(0, 5, 0.0, 0.0, 0.2, [0.1], 1)
    assert record.tpot_s is None
    assert Slo(tpot_ms=0.001).met_by(record.ttft_s, record.tpot_s)
    assert not Slo(ttft_ms=99).met_by(record.ttft_s, record.tpot_s)


def test_a_run_of_failures_only_still_reports():
    record = RequestRecord(0, 5, 0.0, 0.0, 0.0, error="connection")
    report = summarise([record], Slo(ttft_ms=1))
    assert report["errors"] == {"connection": 1}
    assert report["ttft_ms"] is None
    assert report["goodput"]["share"] == 0.0
