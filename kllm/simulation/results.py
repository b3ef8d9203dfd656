"""What a simulated run leaves behind: one outcome per request, samples of every instance, and what was simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kllm.cluster.slo_snapshot import SloSnapshot
from kllm.telemetry.tier_counts import TierCounts

Ending = Literal["completed", "error", "abort", "refused"]


@dataclass(slots=True)
class RequestOutcome:
    """One request as its client saw it. Times are simulated seconds since the start of the run.

    ttft_s: None if no token came. tpot_s: seconds per token after the first, None for outputs of one token.
    cached_tokens: prompt tokens found in the cache. attempts: instances that worked on it (1: nothing went wrong).
    queue_s: of ttft_s, waiting at the instance for a place.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    end_s: float = 0.0
    ending: Ending = "error"
    attempts: int = 1
    detail: str = ""
    queue_s: float | None = None


@dataclass(slots=True)
class InstanceSample:
    """State of one instance at one moment, and what it did since the sample before.

    busy: share of the time that its executor computed, 0 to 1. step_tokens, step_rows: mean over those steps.
    looked_up: prompt tokens of requests that were admitted. hits: those of them that were in the KV cache, and that had
    been brought there for the request from L2 and from L3.
    """

    time_s: float
    instance: int
    up: bool
    running: int
    waiting: int
    kv_usage: float
    busy: float
    step_rows: float
    step_tokens: float
    looked_up: int = 0
    hits: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class FleetResult:
    """Everything a report is made of.

    trace_load: the trace's own arrival rate as a share of the fleet's saturation. load: that of this run.
    cost_per_gpu_hour: dollars, None if not known. gpus: of all instances. chunk_tokens: most prompt tokens of one
    request in a step; prompts of at most so many are short. most_yields: of one request. quota_tokens: see EngineLoad.
    hits: tokens by tier that admitted requests found, all attempts (see InstanceSample). tiers: of all instances; None
    where there are no lower tiers. wasted: blocks brought and gone again when their request was admitted.
    cache_gaps: reports of instances' caches that the gateway found missing.
    """

    outcomes: list[RequestOutcome]
    samples: list[InstanceSample]
    decision_hash: str
    simulated_s: float
    wall_s: float
    steps: int
    gpus: int
    restarts: int = 0
    preemptions: int = 0
    yields: int = 0
    most_yields: int = 0
    quota_tokens: int = 0
    overtakes: int = 0
    chunk_tokens: int = 0
    hits: tuple[int, int, int] = (0, 0, 0)
    tiers: TierCounts | None = None
    wasted: int = 0
    trace_load: float | None = None
    load: float | None = None
    cost_per_gpu_hour: float | None = None
    settings: dict[str, object] = field(default_factory=dict)  # what was simulated, for the report's head
    slo: list[tuple[float, SloSnapshot]] = field(default_factory=list)  # at the same moments as samples
    notes: list[str] = field(default_factory=list)  # scalings and approximations, stated in every report
    cache_gaps: int = 0
    faults: list[str] = field(default_factory=list)  # the faults injected, one line each
