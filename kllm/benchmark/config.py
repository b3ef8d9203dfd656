"""Every knob of the benchmarks. Flags of `kllm bench` are made from these fields, as those of `kllm serve` are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from kllm.config import Config

TraceName = Literal["mooncake-conversation", "mooncake-synthetic", "azure-code", "azure-conv", "weka-agentic"]
TRACES: tuple[TraceName, ...] = get_args(TraceName)


class PromptConfig(Config):
    """Prompts that are made up from random tokens."""

    num_prompts: int = Field(100, ge=1, description="Requests to send; of a trace, the first so many.")
    input_len: int = Field(512, ge=1, description="Prompt tokens, beside a shared prefix.")
    output_len: int = Field(128, ge=1, description="Output tokens; the end of text is ignored.")
    vocab_size: int = Field(32000, ge=2, description="Token ids of prompts are below this.")
    seed: int = Field(0, ge=0, description="Seed of prompts, lengths and arrival times.")


class LoadConfig(PromptConfig):
    """`kllm bench serve`: what to send to which server, when, and what counts as good."""

    url: str = Field("http://127.0.0.1:8000", description="Server to measure.")
    model: str | None = Field(None, description="Model to ask for; by default the first that the server lists.")
    api_key: str | None = Field(None, description="Key to send to the server.")
    dataset: Literal["random", "shared-prefix", TraceName] = Field(
        "random", description="Where prompts, lengths and, for traces, times come from."
    )
    request_rate: float | None = Field(
        None,
        gt=0,
        description="Requests (or conversations) a second, as a Poisson process; inf sends all at once. "
        "By default a trace's own times, inf otherwise.",
    )
    max_concurrency: int | None = Field(None, ge=1, description="Most requests in flight; no limit by default.")
    length_spread: float = Field(0.0, ge=0, lt=1, description="Random lengths vary uniformly by this share.")
    prefix_len: int = Field(384, ge=1, description="Tokens that prompts of the shared-prefix dataset share.")
    num_prefixes: int = Field(1, ge=1, description="Different shared prefixes, taken in turn.")
    scale: float = Field(1.0, gt=0, le=16, description="Factor on the lengths of a trace.")
    speed_up: float = Field(1.0, gt=0, description="Factor by which a trace is replayed faster.")
    trace_dir: Path | None = Field(None, description="Folder of the traces; by default that of kLLM's sources.")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature.")
    warm_up: int = Field(1, ge=0, description="Requests sent first, one by one, that do not count.")
    timeout: float = Field(600.0, gt=0, description="Seconds of silence after which a request has failed.")
    slo_ttft_ms: float | None = Field(None, gt=0, description="Goodput: longest time to first token.")
    slo_tpot_ms: float | None = Field(None, gt=0, description="Goodput: longest time per output token.")


class LatencyConfig(Config):
    """`kllm bench latency`: one request at a time."""

    input_len: int = Field(128, ge=1, description="Prompt tokens.")
    output_len: int = Field(128, ge=1, description="Output tokens; the end of text is ignored.")
    vocab_size: int = Field(32000, ge=2, description="Token ids of prompts are below this.")
    iterations: int = Field(5, ge=1, description="Requests measured; medians are reported.")
    warm_up: int = Field(1, ge=0, description="Requests run first that do not count.")
    seed: int = Field(0, ge=0, description="Seed of the prompts.")


class ThroughputConfig(PromptConfig):
    """`kllm bench throughput`: many requests at once."""

    num_prompts: int = Field(32, ge=1, description="Requests, all given at once.")
    prefix_len: int = Field(0, ge=0, description="Further prompt tokens that all prompts share.")
