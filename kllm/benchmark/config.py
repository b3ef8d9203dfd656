"""Every knob of the benchmarks. Flags of `kllm bench` are made from these fields, as those of `kllm serve` are."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from kllm.config import Config
from kllm.workload.config import SYNTHETIC, LengthConfig, WorkloadConfig
from kllm.workload.traces import TRACES

DATASETS = (*SYNTHETIC, *TRACES)


class PromptConfig(LengthConfig):
    """Prompts that are made up from random tokens."""

    vocab_size: int = Field(32000, ge=2, description="Token ids of prompts are below this.")


class LoadConfig(WorkloadConfig, PromptConfig):
    """`kllm bench serve`: what to send to which server, when, and what counts as good."""

    url: str = Field("http://127.0.0.1:8000", description="Server to measure.")
    model: str | None = Field(None, description="Model to ask for; by default the first that the server lists.")
    api_key: str | None = Field(None, description="Key to send to the server.")
    dataset: str = Field(
        "random",
        description=f"Where prompts, lengths and, for traces, times come from: {', '.join(DATASETS)}, "
        "or a trace file in the format of one of these.",
    )
    max_concurrency: int | None = Field(None, ge=1, description="Most requests in flight; no limit by default.")
    speed_up: float = Field(1.0, gt=0, description="Factor by which a trace is replayed faster.")
    trace_dir: Path | None = Field(None, description="Folder of the named traces; by default that of kLLM's sources.")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature.")
    warm_up: int = Field(1, ge=0, description="Requests sent first, one by one, that do not count.")
    timeout: float = Field(600.0, gt=0, description="Seconds of silence after which a request has failed.")
    slo_ttft_ms: float | None = Field(None, gt=0, description="Goodput: longest time to first token.")
    slo_tpot_ms: float | None = Field(None, gt=0, description="Goodput: longest time per output token.")

    @field_validator("dataset")
    @classmethod
    def _is_known_or_a_file(cls, dataset: str) -> str:
        if dataset not in DATASETS and not Path(dataset).is_file():
            raise ValueError(f"neither one of {', '.join(DATASETS)} nor a file")
        return dataset


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
