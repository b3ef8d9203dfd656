"""Every knob of kLLM, documented where it is declared and validated once, at the edge.

Command-line flags are made from these fields (`max_num_seqs` becomes `--max-num-seqs`), so a field's
description is its help text. Names follow vLLM where the meaning is the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from kllm.events_config import KVEventsConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> object:
    """'4GiB', '512MB', '1.5g' or a number to bytes. Raises ValueError for anything else."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]?i?)b?\s*", value.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size such as 4GiB, 512MiB or 2e9")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_kv_events(value: object) -> object:
    """JSON text to a KVEventsConfig. Raises ValueError that names the field of it that is wrong."""
    if not isinstance(value, str):
        return value
    try:
        return KVEventsConfig.from_json(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("kv_events_config: ")) from error


def check_key(key: str) -> str:
    """Raises ValueError for what nobody could mean as a key, such as a variable of the shell that is not set."""
    if not key or key != key.strip():
        raise ValueError("a key must not be empty, nor begin or end with blanks")
    return key


KV_CACHE_SHARE = 0.25  # of available memory, where no size is given; all instances of a server together

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
ApiKey = Annotated[str, AfterValidator(check_key)]
KVEvents = Annotated[
    KVEventsConfig, BeforeValidator(parse_kv_events), PlainSerializer(lambda config: config.model_dump_json(), str)
]


class Config(BaseModel):
    """Base: unknown names are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(Config):
    """One instance: the model, its memory, and how work is scheduled."""

    model: str = Field(description="Alias (smollm2), local folder, .gguf file or hub id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and activations; auto takes the checkpoint's (bfloat16 for a GGUF, and for "
        "float16 with the cpu operators, which leave that to torch and cannot combine it with quantised weights).",
    )
    quantization: Literal["auto", "none", "int8", "q8_0", "q4_0", "q4_1"] = Field(
        "auto",
        description="Weights: none keeps them in dtype; int8, q8_0, q4_0 and q4_1 quantise while loading; "
        "auto is as shipped (a GGUF's blocks stay packed), or none where dtype is given.",
    )
    activations: Literal["auto", "int8", "float"] = Field(
        "auto",
        description="What quantised weights and an int8 KV cache are multiplied with; auto is int8 where the "
        "operators have it.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto", description="Type of the KV cache; auto is dtype. int8 has a scale for every token and head."
    )
    kernels: Literal["auto", "cpu", "reference", "invariant"] = Field(
        "auto",
        description="Operators: cpu (native), reference (plain torch) or invariant (plain torch, the same bits in any "
        "batch). auto is cpu where it was built and the processor has AVX2.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt plus output in tokens; the model's own length by default."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV cache block.")
    kv_cache_memory: Bytes | None = Field(
        None,
        ge=1,
        description="Memory for the KV cache of one instance, such as 4GiB; by default a quarter of what is available.",
    )
    num_kv_blocks: int | None = Field(None, ge=2, description="Exact number of KV blocks, instead of kv_cache_memory.")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most requests that run at once.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Most tokens computed in one step, over all requests.")
    prefill_chunk: int | None = Field(
        None, ge=1, description="Most prompt tokens of one request in one step; no limit of its own by default."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV of prompts that start alike.")
    report_cache: bool = Field(
        False, description="Tell the gateway what the KV cache holds; on where the gateway routes by it."
    )
    cache_eviction: Literal["lru", "value"] = Field(
        "value",
        description="Which cached prefixes go first when the KV cache is full: lru, those not used for longest, or "
        "value, which lets those stay longer that are likely to be used again, dear to compute, or have no copy below.",
    )
    l2_memory: Bytes = Field(
        0, ge=0, description="Host memory for KV blocks below the KV cache (L2), such as 8GiB; 0: none."
    )
    l2_write: Literal["through", "selective", "back"] = Field(
        "through",
        description="When blocks are copied to L2: as soon as they are computed, once l2_min_reuse requests used them, "
        "or when they are about to be evicted.",
    )
    l2_min_reuse: int = Field(2, ge=2, description="l2_write selective: requests that must have used a block.")
    l3: str | None = Field(
        None,
        description="Store of KV blocks that instances share and that outlives them (L3): a folder on a local disk, "
        "or mooncake://HOST:PORT.",
    )
    l3_capacity: Bytes = Field(
        20 * 2**30,
        ge=2**20,
        description="Most bytes that L3 takes on the disk, or that this instance adds to Mooncake.",
    )
    l3_min_reuse: int = Field(
        1, ge=1, description="Requests that must have used a block before it goes to L3; 1: all blocks go."
    )
    fetch: Literal["predicted", "always"] = Field(
        "predicted",
        description="What is brought up from L2 and L3: blocks predicted to be cheaper fetched than computed, or all.",
    )
    fetch_base_s: float = Field(
        0.25, ge=0, description="Seconds that a request waits for L2 and L3 before it computes instead."
    )
    fetch_per_kilotoken_s: float = Field(
        0.1, ge=0, description="More of them, for each 1,000 tokens of its prompt that are not in the KV cache."
    )
    kv_events_config: KVEvents | None = Field(
        None,
        description='JSON as for vLLM, such as {"enable_kv_cache_events": true}: publish what enters and leaves the '
        "caches, from port 5557 on; each instance has a port of its own (docs/cache-events.md).",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="What a gateway with several instances uses this one for; it can be changed at run time."
    )
    kv_transfer: Literal["off", "shm", "mooncake"] = Field(
        "off",
        description="How KV moves between instances: shm, shared memory of one host, or mooncake, its transfer engine "
        "(TCP or RDMA). On with shm where prefill and decode are separate.",
    )
    kv_transfer_host: str = Field(
        "127.0.0.1", description="kv_transfer mooncake: address of this host that other instances reach it at."
    )
    transfer_memory: Bytes = Field(
        512 * 2**20,
        ge=2**20,
        description="kv_transfer without l2_memory: host memory for KV that is handed over or taken.",
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = Field(
        "fair",
        description="Order of prompts: fcfs, by priority, or fair: those of at most one chunk go first, "
        "longer ones give way at chunk ends and get more the longer they have.",
    )
    fair_growth: float = Field(
        1 / 32, gt=0, le=1, description="fair: what a long prompt is owed for giving way n times, over n, in chunks."
    )
    fair_kv_share: float = Field(
        0.5, gt=0, le=1, description="fair: share of the KV cache that long prompts in progress may need together."
    )
    max_overtakes: int = Field(
        64,
        ge=0,
        description="How often a request that does not fit into the KV cache may be passed by later ones; then room is "
        "kept for it. 0: never.",
    )
    tpot_target_ms: float | None = Field(
        None,
        gt=0,
        description="Time-sliced separation: prompts compute in slices of their own, as long as every request's mean "
        "time per output token stays below so many ms. By default they share steps with requests that decode.",
    )
    prefill_every: int = Field(
        128,
        ge=2,
        description="tpot_target_ms: tokens that a request gets from one slice to the next. More: pauses are rarer and "
        "longer, and prompts wait longer.",
    )
    pipeline_depth: int | None = Field(
        None,
        ge=1,
        le=2,
        description="Plans in flight: 1 plain, 2 plans a step while one runs. Default: what is faster.",
    )
    threads: int | None = Field(
        None, ge=1, description="Compute threads of one instance; by default the available cores."
    )
    bind_threads: bool = Field(False, description="Bind each compute thread of the cpu operators to a core of its own.")
    instruction_set: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2"] = Field(
        "auto", description="Instructions that the cpu operators use; auto is the best the processor has."
    )

    record_steps: Path | None = Field(
        None, description="File that gets a line for every step: what it computed and how long it took."
    )

    @model_validator(mode="after")
    def _tiers_cache_prefixes(self) -> EngineConfig:
        if self.lower_tiers and not self.enable_prefix_caching:
            raise ValueError("l2_memory and l3 keep cached prefixes, so they need enable_prefix_caching")
        if self.kv_transfer != "off" and not self.enable_prefix_caching:
            raise ValueError("kv_transfer moves cached prefixes, so it needs enable_prefix_caching")
        if self.publishes_events and not self.enable_prefix_caching:
            raise ValueError("kv_events_config is about cached prefixes, so it needs enable_prefix_caching")
        return self

    @property
    def publishes_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.on

    @property
    def lower_tiers(self) -> bool:
        """There is a cache below the device's."""
        return self.l2_memory > 0 or self.l3 is not None

    @property
    def stages(self) -> bool:
        """KV passes through host memory: to lower tiers, or from and to other instances."""
        return self.lower_tiers or self.kv_transfer != "off"

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one request in one step. A prompt of at most so many is short."""
        return min(self.prefill_chunk or self.max_num_batched_tokens, self.max_num_batched_tokens)


Role = Literal["both", "prefill", "decode"]
RoutingName = Literal["cache-aware", "least-loaded", "round-robin", "prefix-only", "dynamo", "sglang"]


def roles_of(instances: int, prefill: int, decode: int) -> list[Role]:
    """Of the instances of a server, in order."""
    both: list[Role] = ["both"] * instances
    first: list[Role] = ["prefill"] * prefill
    second: list[Role] = ["decode"] * decode
    return first + second if prefill else both


class ServerConfig(Config):
    """The HTTP server and the gateway behind it."""

    host: str = Field("127.0.0.1", description="Address to bind; loopback unless changed.")
    port: int = Field(8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    instances: int = Field(
        1, ge=1, le=64, description="Instances of the model on this machine; by default they share cores and memory."
    )
    prefill: int = Field(
        0, ge=0, le=64, description="Instances that only prefill (with --decode, instead of --instances)."
    )
    decode: int = Field(
        0, ge=0, le=64, description="Instances that decode what the prefill instances have begun (with --prefill)."
    )
    routing: RoutingName = Field(
        "least-loaded",
        description="Which instance gets a request: the one with the fewest, each in turn, or (cache-aware) the one "
        "that can begin to answer first, given what it has of the prompt; the others are for comparison.",
    )
    api_key: list[ApiKey] = Field([], description="Keys that clients must send as a bearer token; may be repeated.")
    admin_api_key: list[ApiKey] = Field(
        [],
        description="Keys of operators, for /debug, roles and clearing caches; may be repeated. Needed for these as "
        "soon as there are several api_keys: what one client asked is not for another.",
    )
    share_cache_between_keys: bool = Field(
        False,
        description="Let clients with different API keys find each other's cached prefixes. Off, every key has a cache "
        "of its own as soon as there are several.",
    )
    served_model_name: list[str] = Field([], description="Names the model answers to; the first is reported.")
    chat_template: str | None = Field(None, description="File with a Jinja chat template, instead of the model's.")
    max_queue: int = Field(1024, ge=1, description="Most requests accepted at once; more get 429 with Retry-After.")
    slo_ttft_s: float = Field(
        2.0, gt=0, description="Seconds to the first token that nine in ten requests should stay within (SLO Load)."
    )
    slo_tpot_s: float = Field(
        0.1, gt=0, description="The same for the time per token after the first. See /debug/slo and docs/slo-load.md."
    )
    max_body_bytes: Bytes = Field(32 * 2**20, ge=1024, description="Largest request body, such as 32MiB.")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    start_timeout: float = Field(
        600.0, gt=0, description="Seconds an instance may take to load before it counts as dead."
    )
    max_restarts: int = Field(
        5, ge=0, description="Starts of an instance that may fail in a row before the server gives up."
    )
    degrade: bool = Field(
        False,
        description="While SLO Load stays above 1, give things up by grades: extras, then room for long prompts, then "
        "the queue (429 with Retry-After for what is not urgent); docs/failover.md.",
    )
    vllm_metrics: bool = Field(False, description="Export every metric under the prefix vllm: too.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")

    @model_validator(mode="after")
    def _pools_are_whole(self) -> ServerConfig:
        if (self.prefill > 0) != (self.decode > 0):
            raise ValueError("prefill and decode go together: each needs at least one instance")
        if self.prefill and self.instances != 1:
            raise ValueError("give either instances, or prefill and decode")
        return self

    @property
    def roles(self) -> list[Role]:
        """Of the instances, in order."""
        return roles_of(self.instances, self.prefill, self.decode)


class ListenConfig(Config):
    """An instance that gateways come to: `kllm instance`."""

    listen: str = Field(
        "tcp://127.0.0.1:7001",
        description="Address for gateways: tcp://HOST:PORT (port 0 takes a free one) or ipc:///PATH. Other hosts than "
        "this one need key_file.",
    )
    key_file: Path | None = Field(
        None, description="File with the fleet's secret, 64 hexadecimal digits; only gateways that have it get in."
    )
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
