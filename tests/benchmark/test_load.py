"""The load generator against a small streaming server."""

from __future__ import annotations

import asyncio
import json
import time
from io import StringIO
from itertools import islice

import pytest
from rich.console import Console

from kllm.benchmark.client import CompletionClient, sse_events
from kllm.benchmark.config import LoadConfig
from kllm.benchmark.load import run_load
from kllm.benchmark.report import plot_load, print_load_report, write_json
from kllm.benchmark.serving import NothingToSend, make_samples, run_benchmark
from kllm.workload.arrivals import bursty_arrivals, diurnal_arrivals, gamma_arrivals, poisson_arrivals
from kllm.workload.sample import Sample, TokenSource
from kllm.workload.traces import TraceError


def sample(token: int, length: int, output_len: int, arrival_s: float = 0.0, after: int | None = None) -> Sample:
    """A prompt of one token repeated, which is how these tests choose what the server does with it."""
    return Sample((((token,), length),), output_len, arrival_s, after)


def repeated(sample: Sample) -> list[int]:
    return [token for (token,), length in sample.parts for _ in range(length)]


def load(url, samples, **options):
    async def run():
        client = CompletionClient(url, "words", None, 10.0, {}, repeated)
        try:
            return await run_load(client, samples, **options)
        finally:
            await client.close()

    return asyncio.run(run())


def test_every_request_is_measured(token_server):
    records = load(token_server.url, [sample(100 + i, 7, 5 + i) for i in range(4)])
    assert [r.error for r in records] == [None] * 4
    assert [r.output_tokens for r in records] == [5, 6, 7, 8]
    assert [len(r.chunk_s) for r in records] == [5, 6, 7, 8]
    assert {(r.prompt_tokens, r.cached_tokens) for r in records} == {(7, 3)}
    for record in records:
        assert record.sent_s <= record.chunk_s[0] <= record.chunk_s[-1] <= record.end_s
        assert record.tpot_s == pytest.approx(sum(record.itl_s) / (record.output_tokens - 1))
        assert record.ttft_s >= 0.002  # the server makes a token every 2 ms


def test_bodies_ask_for_exact_lengths_by_token_ids(token_server):
    load(token_server.url, [Sample((((300,), 2), ((301,), 1)), 4)])
    (body,) = token_server.bodies
    assert body["prompt"] == [300, 300, 301]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_failures_are_told_apart(token_server):
    records = load(token_server.url, [sample(kind, 2, 3) for kind in (1, 2, 3, 4, 500)])
    kinds = [record.error for record in records]
    assert kinds == ["http 429", "stream cut off", "error in stream", "bad chunk", None]
    assert "queue is full" in records[0].detail


def test_where_no_usage_is_sent_chunks_are_counted(token_server):
    (record,) = load(token_server.url, [sample(5, 2, 4)])
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 4, 2)
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / 3)


def test_nobody_listening_is_a_connection_error(unused_port):
    (record,) = load(f"http://127.0.0.1:{unused_port}", [sample(5, 1, 1)])
    assert record.error == "connection"


def test_arrivals_are_absolute_and_do_not_wait_for_answers(token_server):
    samples = [sample(100, 2, 50, arrival_s=i * 0.02) for i in range(10)]
    start = time.perf_counter()
    records = load(token_server.url, samples)
    elapsed = time.perf_counter() - start
    for sent, record in zip(samples, records, strict=True):
        assert record.scheduled_s == sent.arrival_s
        assert record.sent_s >= sent.arrival_s
    assert token_server.most_running > 1
    assert elapsed < sum(record.e2e_s for record in records)


def test_max_concurrency_holds(token_server):
    load(token_server.url, [sample(100 + i, 2, 5) for i in range(12)], max_concurrency=3)
    assert 1 < token_server.most_running <= 3


def test_a_turn_waits_for_the_one_before_it(token_server):
    samples = [sample(100, 1, 10), sample(101, 1, 2, arrival_s=0.03, after=0)]
    first, second = load(token_server.url, samples)
    assert second.sent_s >= first.end_s + 0.03


def test_a_turn_follows_even_a_failed_one(token_server):
    first, second = load(token_server.url, [sample(1, 1, 2), sample(101, 1, 2, after=0)], max_concurrency=1)
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
    records = load(token_server.url, [sample(kind, 1, 5) for kind in (1, 100, 101, 102)])
    plot_load(tmp_path / "run.png", records)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_requests_that_do_not_fit_the_model_are_left_out_and_counted(token_server):
    config = LoadConfig(url=token_server.url, dataset="mooncake-conversation", num_prompts=30, scale=0.1, speed_up=1e6)
    samples = make_samples(config)
    fitting = [s for s in samples if s.input_len + s.output_len <= 1000]
    report, _ = asyncio.run(run_benchmark(config, samples))
    assert 0 < report["too_long"] == 30 - len(fitting)
    assert report["completed"] == len(fitting)
    assert report["scaling"] == [
        "lengths are 1/10 of the trace's",
        "times between requests are 1e-06 times the trace's",
    ]
    print_load_report(report, Console(file=(printed := StringIO()), width=200))
    assert "lengths are 1/10 of the trace's; times" in printed.getvalue()
    with pytest.raises(NothingToSend, match="1000 tokens"):
        asyncio.run(run_benchmark(config, [sample(1, 2000, 5)]))


def test_prompts_are_made_of_the_seed(token_server):
    config = LoadConfig(
        url=token_server.url, num_prompts=3, input_len=10, output_len=1, seed=5, vocab_size=900, warm_up=0
    )
    samples = make_samples(config)
    asyncio.run(run_benchmark(config, samples))
    source = TokenSource(5, 900)
    assert sorted(body["prompt"] for body in token_server.bodies) == sorted(map(source.prompt, samples))


def test_conversations_are_sent_turn_by_turn(token_server):
    config = LoadConfig(
        url=token_server.url,
        dataset="sessions",
        num_prompts=8,
        turns=4,
        input_len=20,
        turn_len=5,
        output_len=3,
        think_time=0.0,
    )
    report, records = asyncio.run(run_benchmark(config, make_samples(config)))
    assert (report["completed"], report["scaling"]) == (8, [])
    assert [r.prompt_tokens for r in records] == [20, 28, 36, 44] * 2
    for turn, record in enumerate(records):
        if turn % 4:
            assert record.sent_s >= records[turn - 1].end_s


@pytest.mark.parametrize(
    ("arrivals", "options", "process"),
    [
        ("poisson", {}, poisson_arrivals(2.0, 3)),
        ("gamma", {"arrival_cv": 4.0}, gamma_arrivals(2.0, 4.0, 3)),
        ("bursty", {"burst_on": 1.0, "burst_off": 3.0}, bursty_arrivals(8.0, 1.0, 3.0, 3)),
        ("diurnal", {"diurnal_period": 60.0, "diurnal_amplitude": 0.5}, diurnal_arrivals(2.0, 60.0, 0.5, 3)),
    ],
)
def test_samples_come_at_the_times_of_the_process_asked_for(arrivals, options, process):
    config = LoadConfig(num_prompts=20, request_rate=2.0, arrivals=arrivals, seed=3, **options)
    assert [s.arrival_s for s in make_samples(config)] == list(islice(process, 20))


def test_long_and_short_prompts():
    config = LoadConfig(
        dataset="long-short", num_prompts=200, input_len=10, long_input_len=1000, long_share=0.25, output_len=4
    )
    lengths = [s.input_len for s in make_samples(config)]
    assert set(lengths) == {10, 1000}
    assert 30 < lengths.count(1000) < 70


def test_a_trace_may_be_any_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,10,5\n2024-01-01 00:00:02,20,6\n")
    config = LoadConfig(dataset=str(path))
    assert [(s.input_len, s.output_len, s.arrival_s) for s in make_samples(config)] == [(10, 5, 0.0), (20, 6, 2.0)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,0,5\n")
    with pytest.raises(TraceError, match=r"mine\.csv, line 2, field ContextTokens"):
        make_samples(config)


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({}, []),
        ({"scale": 0.5, "speed_up": 3.0, "request_rate": 2.0}, ["lengths are 1/2 of the trace's"]),
    ],
)
def test_a_rate_of_ones_own_is_told_instead_of_a_speed_up(token_server, options, sentences):
    config = LoadConfig(url=token_server.url, dataset="azure-conv", num_prompts=1, warm_up=0, **options)
    report, _ = asyncio.run(run_benchmark(config, make_samples(config)))
    rate = ["requests come as a poisson process of 2 a second"] if options else []
    assert report["scaling"] == sentences + rate


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_whatever_the_chunks(size):
    text = b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'

    async def chunks():
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def collect():
        return [event async for event in sse_events(chunks())]

    assert asyncio.run(collect()) == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
