"""What an engine's /metrics say of its load, in vLLM's names."""

from __future__ import annotations

import re

import msgspec

PREFIXES = ("vllm:", "kllm:")
NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
    "num_preemptions_total": "preemptions",
    "iteration_tokens_total_count": "steps",
}
CACHE_CONFIG = "cache_config_info"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the engine's labels, the mean for kv_usage; counters since its start. 0 for what it does not say.

    block_tokens, num_blocks: of its KV cache."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    preemptions: float = 0.0
    steps: float = 0.0
    block_tokens: int = 0
    num_blocks: int = 0


def parse_metrics(text: str) -> EngineMetrics | None:
    """From Prometheus' text format; None if it has no metric of an engine. Lines that make no sense are skipped."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    cache: dict[str, str] = {}
    prefix = next((prefix for prefix in PREFIXES if f"\n{prefix}" in f"\n{text}"), None)
    if prefix is None:
        return None
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        name = re.split(r"[{ ]", line[len(prefix) :], maxsplit=1)[0]
        if name == CACHE_CONFIG:
            cache = dict(_LABEL.findall(line))
        elif (field := NAMES.get(name)) is not None:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            sums[field] = sums.get(field, 0.0) + value
            counts[field] = counts.get(field, 0) + 1
    if "kv_usage" in sums:
        sums["kv_usage"] /= counts["kv_usage"]
    return EngineMetrics(
        **sums, block_tokens=_number(cache.get("block_size")), num_blocks=_number(cache.get("num_gpu_blocks"))
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,12}", text) else 0
