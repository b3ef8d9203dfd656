from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from kllm.telemetry.metrics import Metrics

DASHBOARD = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_requests_blocked",
    "num_prefill_yields",
    "prefill_quota_tokens",
    "num_overtakes",
    "request_wait_seconds",
    "cache_config_info",
    "instance_restarts",
]


def source() -> SimpleNamespace:
    gauges = {"running": 3, "waiting": 2, "blocked": 1, "kv_usage": 0.25}
    counters = {
        "preemptions": 1,
        "prefix_queries": 9,
        "prefix_hits": 4,
        "yields": 6,
        "quota_tokens": 640,
        "overtakes": 8,
        "l2_hits": 0,
        "l3_hits": 0,
        "wasted": 0,
        "tiers": None,
        "events_sent": 12,
        "events_dropped": 2,
    }
    load = SimpleNamespace(**gauges, **counters)
    return SimpleNamespace(loads=[load], totals=load, restarts=7, grade=0, trips=0)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, finished_reason or le, after the class if there is one) to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = sample.labels
            assert labels["model_name"] == "m"
            assert labels["engine"] == "0"
            parts = [labels[name] for name in ("class", "finished_reason", "le") if name in labels]
            found[sample.name, " ".join(parts)] = sample.value
    return found


def test_names_and_prefixes() -> None:
    metrics = Metrics("m", source(), lambda: {"block_size": "16"}, vllm_names=True)
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    for prefix in ("kllm:", "vllm:"):
        assert {prefix + name for name in DASHBOARD} <= names
    only_ours = Metrics("m", source(), dict).render().decode()
    assert "vllm:" not in only_ours


def test_figures_of_the_source_are_read_at_scrape_time() -> None:
    figures = source()
    metrics = Metrics("m", figures, dict)
    assert samples(metrics)["kllm:num_requests_running", ""] == 3
    figures.loads[0].running = 5
    found = samples(metrics)
    assert found["kllm:num_requests_running", ""] == 5
    assert found["kllm:kv_cache_usage_perc", ""] == 0.25
    assert found["kllm:num_preemptions_total", ""] == 1
    assert found["kllm:instance_restarts_total", ""] == 7
    assert found["kllm:num_requests_blocked", ""] == 1
    assert found["kllm:num_prefill_yields_total", ""] == 6
    assert found["kllm:prefill_quota_tokens_total", ""] == 640
    assert found["kllm:num_overtakes_total", ""] == 8
    assert found["kllm:cache_event_messages_total", ""] == 12
    assert found["kllm:cache_event_batches_dropped_total", ""] == 2


def test_every_instance_has_its_gauges() -> None:
    figures = source()
    figures.loads.append(SimpleNamespace(running=1, waiting=0, blocked=0, kv_usage=0.5))
    families = {f.name: f for f in text_string_to_metric_families(Metrics("m", figures, dict).render().decode())}
    running = families["kllm:num_requests_running"].samples
    assert [(sample.labels["engine"], sample.value) for sample in running] == [("0", 3), ("1", 1)]
    assert [sample.value for sample in families["kllm:kv_cache_usage_perc"].samples] == [0.25, 0.5]
    assert [sample.labels["engine"] for sample in families["kllm:num_preemptions"].samples] == ["0"]


def test_life_of_a_request() -> None:
    metrics = Metrics("m", source(), dict)
    request = metrics.request(prompt_tokens=10, arrival=100.0)
    request.tokens(0, 100.1)
    request.timings(0.25, 0.5)
    request.tokens(1, 101.0)
    request.tokens(2, 101.5)
    request.end("stop", 102.0)
    request.end("abort", 103.0)
    found = samples(metrics)
    assert found["kllm:time_to_first_token_seconds_sum", ""] == 1.0
    assert found["kllm:inter_token_latency_seconds_count", ""] == 2
    assert found["kllm:inter_token_latency_seconds_sum", ""] == 0.5
    assert found["kllm:request_time_per_output_token_seconds_sum", ""] == 0.25
    assert found["kllm:e2e_request_latency_seconds_sum", ""] == 2.0
    assert found["kllm:request_queue_time_seconds_sum", ""] == 0.25
    assert found["kllm:request_prefill_time_seconds_sum", ""] == 0.5
    assert found["kllm:request_decode_time_seconds_sum", ""] == 0.5
    assert found["kllm:request_generation_tokens_sum", ""] == 3
    assert found["kllm:prompt_tokens_total", ""] == 10
    assert found["kllm:generation_tokens_total", ""] == 3
    assert found["kllm:request_success_total", "stop"] == 1
    assert found["kllm:request_success_total", "abort"] == 0


def test_waits_are_told_apart_by_prompt_length() -> None:
    chunk = 0
    metrics = Metrics("m", source(), dict, lambda: chunk)
    metrics.request(900, 0.0).timings(0.5, 0.5)  # the chunk is not known yet
    chunk = 512
    for tokens in (1, 512, 513, 4000):
        metrics.request(tokens, 0.0).timings(1.0, tokens / 1000)
    found = samples(metrics)
    assert found["kllm:request_wait_seconds_count", "short"] == 3
    assert found["kllm:request_wait_seconds_sum", "short"] == 1.0 + 1.001 + 1.512
    assert found["kllm:request_wait_seconds_count", "long"] == 2
    assert found["kllm:request_wait_seconds_bucket", "long 2.0"] == 1


def test_first_push_of_several_tokens_shares_nothing() -> None:
    metrics = Metrics("m", source(), dict)
    metrics.request(1, 0.0).tokens(4, 2.0)
    found = samples(metrics)
    assert found["kllm:time_to_first_token_seconds_sum", ""] == 2.0
    assert (found["kllm:inter_token_latency_seconds_count", ""], found["kllm:inter_token_latency_seconds_sum", ""]) == (
        3,
        0,
    )


def test_request_without_output() -> None:
    metrics = Metrics("m", source(), dict)
    metrics.request(5, 0.0).end("error", 1.0)
    found = samples(metrics)
    assert found["kllm:request_success_total", "error"] == 1
    assert found["kllm:time_to_first_token_seconds_count", ""] == 0
    assert found["kllm:prompt_tokens_total", ""] == 0
