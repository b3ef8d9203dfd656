"""Every knob of `kllm simulate`. Flags and the keys of a file are made from these fields."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field, model_validator

from kllm.cluster.pool_routing import PoolSettings
from kllm.cluster.pool_variants import POOL_POLICIES, pool_policy
from kllm.config import Bytes, RoutingName, roles_of
from kllm.messages import Role
from kllm.workload.config import SYNTHETIC, WorkloadConfig
from kllm.workload.traces import TRACES


class SimulationConfig(WorkloadConfig):
    """What is sent, to which fleet, and what goes wrong."""

    trace: str = Field(
        "mooncake-conversation",
        description=f"What is sent: a trace by name ({', '.join(TRACES)}), a trace file, or made-up requests "
        f"({', '.join(SYNTHETIC)}).",
    )
    limit_seconds: float | None = Field(None, gt=0, description="Take the trace's requests of the first so many s.")
    num_prompts: int | None = Field(  # type: ignore[assignment]  # of a trace, all by default
        None, ge=1, description="Requests to send; of a trace the first so many, by default all; 1000 made-up ones."
    )
    load: float | None = Field(
        None, gt=0, le=10, description="Arrival rate as a share of the fleet's saturation; by default the trace's own."
    )
    hardware: str = Field("h200", description="Accelerator (kllm capacity lists them), or this-machine.")
    model: str = Field("glm-5.2", description="Model whose cost is simulated.")
    layout: str | None = Field(None, description="How a model is spread over an instance's GPUs: tp8, dp8ep8, …")
    gpus_per_instance: int | None = Field(
        None, ge=1, description="GPUs of an instance; the fewest that fit by default."
    )
    step_times: str | None = Field(None, description="File of step times fitted to a real engine, instead of presets.")
    kv_tokens: int | None = Field(None, ge=1, description="Tokens of KV cache of an instance; by default what fits.")
    instances: int = Field(8, ge=1, le=4096, description="Instances, each prefilling and decoding.")
    prefill: int = Field(
        0, ge=0, le=2048, description="Instances that only prefill (with --decode, instead of --instances)."
    )
    decode: int = Field(
        0, ge=0, le=2048, description="Instances that decode what the prefill instances have begun (with --prefill)."
    )
    pools: str = Field(
        "global",
        description=f"How P and D are chosen, with --prefill and --decode: {', '.join(POOL_POLICIES)}, or groups:N and "
        "groups-in-turn:N for N fixed groups.",
    )
    routing: RoutingName = Field("least-loaded", description="How instances that prefill and decode are chosen.")
    seed: int = Field(0, ge=0, description="Seed of everything random: load, noise, network, faults.")
    block_size: int = Field(64, ge=1, le=1024, description="Tokens per KV cache block.")
    max_num_seqs: int = Field(256, ge=1, le=4096, description="Most requests that run at once on an instance.")
    max_num_batched_tokens: int = Field(8192, ge=1, description="Most tokens computed in one step.")
    prefill_chunk: int | None = Field(None, ge=1, description="Most prompt tokens of one request in one step.")
    max_model_len: int | None = Field(None, ge=2, description="Longest prompt plus output; the model's by default.")
    scheduling_policy: Literal["fcfs", "priority", "fair"] = Field("fair", description="Order of prompts.")
    fair_growth: float = Field(1 / 32, gt=0, le=1, description="fair: owed for giving way n times, over n, in chunks.")
    fair_kv_share: float = Field(0.5, gt=0, le=1, description="fair: share of the KV cache for long prompts.")
    max_overtakes: int = Field(64, ge=0, description="How often a request that does not fit may be passed.")
    tpot_target_ms: float | None = Field(
        None,
        gt=0,
        description="Time-sliced separation: prompts in slices of their own; mean time per token that they leave.",
    )
    prefill_every: int = Field(128, ge=2, description="tpot_target_ms: tokens of a request from one slice to the next.")
    enable_prefix_caching: bool = Field(True, description="Reuse KV of prompts that start alike.")
    cache_eviction: Literal["lru", "value"] = Field(
        "value",
        description="Which cached prefixes go first when the KV cache is full: the coldest, or those worth least.",
    )
    l2_memory: Bytes = Field(
        0,
        ge=0,
        description="Host memory of an instance for KV blocks below its KV cache (L2), such as 1000GiB; 0: none.",
    )
    l2_write: Literal["through", "selective", "back"] = Field(
        "through",
        description="When blocks are copied to L2: as soon as they are computed, once l2_min_reuse requests used them, "
        "or when they are about to be evicted.",
    )
    l2_min_reuse: int = Field(2, ge=2, description="l2_write selective: requests that must have used a block.")
    l2_gb_s: float | None = Field(
        None, gt=0, description="GB/s between the KV cache and L2; by default 0.8 of the PCIe of an instance's GPUs."
    )
    l2_latency_us: float = Field(20.0, ge=0, description="Microseconds of a copy besides.")
    l3: str | None = Field(None, description="Any name, such as shared: the fleet has a store of KV blocks (L3).")
    l3_capacity: Bytes = Field(16 * 2**40, ge=2**20, description="Bytes that the store holds.")
    l3_min_reuse: int = Field(
        1, ge=1, description="Requests that must have used a block before it goes to L3; 1: all blocks go."
    )
    l3_gb_s: float = Field(20.0, gt=0, description="GB/s between an instance and L3, reads and writes together.")
    l3_latency_ms: float = Field(1.0, ge=0, description="Milliseconds of a call to L3 besides.")
    transfer_memory: Bytes = Field(
        256 * 2**30,
        ge=2**20,
        description="Host memory of an instance for KV that is handed over or taken (--prefill), without l2_memory.",
    )
    transfer_gb_s: float = Field(
        20.0, gt=0, description="GB/s at which an instance takes KV from another, all its transfers together."
    )
    transfer_latency_ms: float = Field(1.0, ge=0, description="Milliseconds of a transfer besides.")
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
    pipeline_depth: int = Field(2, ge=1, le=2, description="Plans in flight: 2 plans a step while one runs.")
    noise: float = Field(0.05, ge=0, le=1, description="Spread of a step's time around its mean (sigma of its log).")
    deviation: float = Field(
        0.1, ge=0, le=1, description="How far the true cost of each kind of operator is from the model's."
    )
    planning_step_us: float = Field(150.0, ge=0, description="Time to plan and commit a step.")
    planning_row_us: float = Field(12.0, ge=0, description="The same, for each row of it.")
    start_s: float = Field(60.0, ge=0, description="Time from launch to ready of an instance.")
    silence_s: float = Field(10.0, gt=0, description="Silence after which the gateway gives an instance up.")
    max_queue: int = Field(1_000_000, ge=1, description="Most requests accepted at once.")
    faults: str | None = Field(
        None, description="Faults, such as '12.5 crash 2; 30 slow 1 for 20 by 4', or random:SEED, or random:SEED:COUNT."
    )
    slo_ttft_ms: float = Field(4000.0, gt=0, description="Goodput: longest time to first token.")
    slo_tpot_ms: float = Field(60.0, gt=0, description="Goodput: longest time per output token.")
    sample_every_s: float | None = Field(None, gt=0, description="Simulated seconds between looks at the instances.")

    @property
    def lower_tiers(self) -> bool:
        """There is a cache below the instances' own."""
        return self.l2_memory > 0 or self.l3 is not None

    @property
    def separated(self) -> bool:
        """Instances have roles."""
        return self.prefill > 0

    @property
    def roles(self) -> list[Role]:
        """Of the instances, in order."""
        return roles_of(self.instances, self.prefill, self.decode)

    @model_validator(mode="after")
    def _tiers_cache_prefixes(self) -> SimulationConfig:
        if self.lower_tiers and not self.enable_prefix_caching:
            raise ValueError("l2_memory and l3 keep cached prefixes, so they need enable_prefix_caching")
        return self

    @model_validator(mode="after")
    def _pools_are_whole(self) -> SimulationConfig:
        if (self.prefill > 0) != (self.decode > 0):
            raise ValueError("prefill and decode go together: each needs at least one instance")
        if self.prefill and "instances" in self.model_fields_set:
            raise ValueError("give either instances, or prefill and decode")
        if self.prefill and not self.enable_prefix_caching:
            raise ValueError("KV is handed over as cached prefixes: prefill and decode need enable_prefix_caching")
        pool_policy(self.pools, max(1, self.prefill), max(1, self.decode), PoolSettings(), random.Random(0))
        return self
