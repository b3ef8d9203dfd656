"""Load figures from Prometheus' text."""

from __future__ import annotations

from kllm.cluster.external.engine_metrics import EngineMetrics, parse_metrics

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_running{engine="1",model_name="a b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="a b"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 1.5e+01
vllm:num_preemptions_total{engine="0",model_name="a b"} nonsense
vllm:iteration_tokens_total_count{engine="0",model_name="a b"} 7.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="128"} 1.0
process_open_fds 12.0
"""


def test_vllm() -> None:
    assert parse_metrics(TEXT) == EngineMetrics(
        running=5,
        waiting=1,
        kv_usage=0.375,
        prefix_queries=100,
        prefix_hits=15,
        steps=7,
        block_tokens=32,
        num_blocks=128,
    )


def test_ours_under_both_prefixes_counts_once() -> None:
    ours = 'kllm:num_requests_running{engine="0"} 2.0\nkllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1.0\n'
    both = ours + ours.replace("kllm:", "vllm:")
    assert parse_metrics(ours) == parse_metrics(both) == EngineMetrics(running=2, block_tokens=16, num_blocks=9)


def test_something_else() -> None:
    assert parse_metrics("") is None
    assert parse_metrics("process_open_fds 12.0\nother:vllm:x 1\n") is None
    assert parse_metrics('vllm:cache_config_info{block_size="None",num_gpu_blocks="-1"} 1.0') == EngineMetrics()
