"""The load generator against a small streaming server."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from kllm.benchmark.client import CompletionClient, sse_events
from kllm.benchmark.config import LoadConfig
from kllm.benchmark.dataset import Sample
from kllm.benchmark.load import run_load
from kllm.benchmark.report import plot_load, write_json
from kllm.benchmark.serving import NothingToSend, make_samples, run_benchmark


def load(url, samples, **options):
    async def run():
        client = CompletionClient(url, "words", None, 10.0, {})
        try:
            return await run_load(client, samples, **options)
        finally:
            await client.close()

    return asyncio.run(run())


def test_every_request_is_measured(token_server):
    records = load(token_server.url, [Sample([100 + i] * 7, 5 + i) for i in range(4)])
    assert [r.error for r in records] == [None] * 4
    assert [r.output_tokens for r in records] == [5, 6, 7, 8]
    assert [len(r.chunk_s) for r in records] == [5, 6, 7, 8]
    assert {(r.prompt_tokens, r.cached_tokens) for r in records} == {(7, 3)}
    for record in records:
        assert record.sent_s <= record.chunk_s[0] <= record.chunk_s[-1] <= record.end_s
        assert record.tpot_s == pytest.approx(sum(record.itl_s) / (record.output_tokens - 1))
        assert record.ttft_s >= 0.002  # the server makes a token every 2 ms


def test_bodies_ask_for_exact_lengths_by_token_ids(token_server):
    load(token_server.url, [Sample([300, 301, 302], 4)])
    (body,) = token_server.bodies
    assert body["prompt"] == [300, 301, 302]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_failures_are_told_apart(token_server):
    records = load(token_server.url, [Sample([kind, 9], 3) for kind in (1, 2, 3, 4, 500)])
    kinds = [record.error for record in records]
    assert kinds == ["http 429", "stream cut off", "error in stream", "bad chunk", None]
    assert "queue is full" in records[0].detail


def test_nobody_listening_is_a_connection_error(unused_port):
    (record,) = load(f"http://127.0.0.1:{unused_port}", [Sample([5], 1)])
    assert record.error == "connection"


def test_arrivals_are_absolute_and_do_not_wait_for_answers(token_server):
    samples = [Sample([100, 1], 50, arrival_s=i * 0.02) for i in range(10)]
    start = time.perf_counter()
    records = load(token_server.url, samples)
    elapsed = time.perf_counter() - start
    for sample, record in zip(samples, records, strict=True):
        assert record.scheduled_s == sample.arrival_s
        assert record.sent_s >= sample.arrival_s
    assert token_server.most_running > 1
    assert elapsed < sum(record.e2e_s for record in records)


def test_max_concurrency_holds(token_server):
    load(token_server.url, [Sample([100, i], 5) for i in range(12)], max_concurrency=3)
    assert 1 < token_server.most_running <= 3


def test_a_turn_waits_for_the_one_before_it(token_server):
    samples = [Sample([100], 10), Sample([101], 2, arrival_s=0.03, after=0)]
    first, second = load(token_server.url, samples)
    assert second.sent_s >= first.end_s + 0.03


def test_a_turn_follows_even_a_failed_one(token_server):
    first, second = load(token_server.url, [Sample([1], 2), Sample([101], 2, after=0)], max_concurrency=1)
    assert (first.error, second.error) == ("http 429", None)


def test_whole_benchmark_with_files(token_server, tmp_path):
    config = LoadConfig(
        url=token_server.url, num_prompts=20, input_len=16, output_len=6, request_rate=200, slo_ttft_ms=10_000
    )
    report, records = asyncio.run(run_benchmark(config, make_samples(config)))
    assert (report["completed"], report["errors"], report["model"]) == (20, {}, "words")
    assert report["output_tokens"] == 120
    assert report["cached_tokens"] == 60
    assert report["goodput"]["share"] == 1.0
    assert set(report["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    write_json(tmp_path / "run.json", report, records)
    written = json.loads((tmp_path / "run.json").read_text())
    assert len(written["records"]) == 20
    assert len(written["records"][0]["chunk_s"]) == 6


def test_plot_is_drawn(token_server, tmp_path):
    pytest.importorskip("matplotlib")
    records = load(token_server.url, [Sample([kind], 5) for kind in (1, 100, 101, 102)])
    plot_load(tmp_path / "run.png", records)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_requests_that_do_not_fit_the_model_are_left_out_and_counted(token_server):
    config = LoadConfig(url=token_server.url, dataset="mooncake-conversation", num_prompts=30, scale=0.1, speed_up=1e6)
    samples = make_samples(config)
    fitting = [s for s in samples if len(s.prompt_token_ids) + s.output_len <= 1000]
    report, _ = asyncio.run(run_benchmark(config, samples))
    assert 0 < report["too_long"] == 30 - len(fitting)
    assert report["completed"] == len(fitting)
    with pytest.raises(NothingToSend, match="1000 tokens"):
        asyncio.run(run_benchmark(config, [Sample([1] * 2000, 5)]))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_whatever_the_chunks(size):
    text = b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'

    async def chunks():
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def collect():
        return [event async for event in sse_events(chunks())]

    assert asyncio.run(collect()) == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
