"""From a SimulationConfig to a finished run: the trace, the fleet it asks for, and what was assumed on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from kllm.cluster.pool_prediction import TransferCost
from kllm.cluster.pool_routing import PoolPolicy, PoolSettings
from kllm.cluster.pool_variants import pool_policy
from kllm.cluster.routers import ROUTERS
from kllm.cluster.slo_snapshot import SloLimits
from kllm.config import EngineConfig
from kllm.costs.capacity import Capacity, Deployment, best_layout, kv_capacity, smallest_gpus
from kllm.costs.errors import CostError
from kllm.costs.fitted import load_step_time
from kllm.costs.hardware import Hardware, find_hardware
from kllm.costs.layout import Layout, parse_layout
from kllm.costs.model_specs import ModelSpec, find_model
from kllm.costs.noise import NoisyStepTime, StepTimeSource, perturbed
from kllm.costs.roofline import RooflineModel
from kllm.costs.step import StepTimeModel
from kllm.engine.assembly import host_slots
from kllm.simulation.config import SimulationConfig
from kllm.simulation.executor import PlanningCost
from kllm.simulation.fabric import Weather
from kllm.simulation.faults import FaultError, FaultSchedule
from kllm.simulation.fleet import FleetSpec, Progress, run_fleet
from kllm.simulation.launcher import InstanceSpec, TierSpeeds
from kllm.simulation.load import make_load
from kllm.simulation.results import FleetResult
from kllm.simulation.saturation import InstanceLimits, MeanRequest, pools_saturation_rate, saturation_rate
from kllm.workload.sample import Sample, TokenSource, fitting

START_PHASES = (("place", 0.02), ("process", 0.08), ("weights", 0.6), ("compile", 0.2), ("register memory", 0.1))
TIMELINE_POINTS = 400
ENGINE_KNOBS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "scheduling_policy",
    "fair_growth",
    "fair_kv_share",
    "max_overtakes",
    "tpot_target_ms",
    "prefill_every",
    "enable_prefix_caching",
    "cache_eviction",
    "l2_memory",
    "l2_write",
    "l2_min_reuse",
    "l3",
    "l3_capacity",
    "l3_min_reuse",
    "transfer_memory",
    "fetch",
    "fetch_base_s",
    "fetch_per_kilotoken_s",
    "pipeline_depth",
)
PCIE_EFFICIENCY = 0.8  # of the nominal rate, as for the accelerators' own memory


class SimulationError(ValueError):
    """The run that was asked for is not possible; the message says why."""


@dataclass(frozen=True)
class _Costs:
    """What an instance is: its step times as a predictor sees them, and what it holds."""

    model: StepTimeModel
    source: Callable[[random.Random], StepTimeSource]
    kv_tokens: int
    kv_bytes_per_token: float
    host_gb_s: float
    max_model_len: int
    gpus: int
    dollars_per_hour: float
    top_k: int | None
    vocab_size: int
    notes: list[str]
    settings: dict[str, object]


def simulate(
    config: SimulationConfig,
    on_progress: Progress = lambda now, done, total: None,
    decisions: TextIO | None = None,
    extra: Sequence[Sample] = (),
    weather: Weather | None = None,
) -> FleetResult:
    """Run it. extra: sent besides what the config says, each at its own time; they come last in the outcomes.
    weather: of the network; fair by default.

    Raises TraceError, LoadError, CostError, FaultError or SimulationError for what cannot be done."""
    costs = _costs(config)
    load = make_load(config, costs.kv_tokens, lambda mean: _saturation(config, costs, mean))
    kept = fitting([*load.samples, *extra], costs.max_model_len)
    if not kept:
        raise SimulationError(f"no request fits the {costs.max_model_len} tokens of an instance; a scale may help")
    spec = _fleet_spec(config, costs, kept)
    spec.weather = weather or spec.weather
    result = run_fleet(
        spec, kept, TokenSource(config.seed, costs.vocab_size), decisions=decisions, on_progress=on_progress
    )
    result.gpus = len(config.roles) * costs.gpus
    result.cost_per_gpu_hour = costs.dollars_per_hour / costs.gpus
    result.trace_load, result.load = load.native, load.load
    result.settings = {"trace": config.trace, **_fleet_settings(config), **costs.settings, "seed": config.seed}
    result.settings["saturation_rps"] = round(load.saturation_rps, 4)
    result.notes = [*costs.notes, *load.notes]
    if left_out := len(load.samples) + len(extra) - len(kept):
        result.notes.append(f"{left_out} requests are left out: they exceed {costs.max_model_len} tokens")
    return result


def saturation_rps(config: SimulationConfig) -> float:
    """Requests a second of this config's load that saturate its fleet. Raises what simulate() raises."""
    costs = _costs(config)
    return make_load(config, costs.kv_tokens, lambda mean: _saturation(config, costs, mean)).saturation_rps


def _saturation(config: SimulationConfig, costs: _Costs, mean: MeanRequest) -> float:
    limits = InstanceLimits(costs.kv_tokens, config.max_num_batched_tokens, config.max_num_seqs, costs.top_k)
    if config.separated:
        return pools_saturation_rate(mean, config.prefill, config.decode, limits, costs.model)
    return config.instances * saturation_rate(mean, limits, costs.model)


def _fleet_settings(config: SimulationConfig) -> dict[str, object]:
    if config.separated:
        return {"prefill": config.prefill, "decode": config.decode, "pools": config.pools}
    return {"instances": config.instances, "routing": config.routing}


# -- the instance --------------------------------------------------------------------------------------------


def _costs(config: SimulationConfig) -> _Costs:
    model, hardware = find_model(config.model), find_hardware(config.hardware)
    capacity = _capacity(config, model)
    notes = [
        f"KV capacity of an instance: {capacity.tokens:,} tokens ({capacity.layout} on {capacity.layout.gpus} "
        f"{hardware.name}, {capacity.kv_bytes_per_token:,.0f} B a token)"
    ]
    if capacity.layout.dp > 1:
        notes.append(f"the {capacity.layout.dp} groups of an instance are scheduled as one pool, evenly filled")
    predicted: StepTimeModel
    if config.step_times is None:
        roofline = RooflineModel(
            hardware, model, capacity.layout, weights_dtype=capacity.weights_dtype, kv_dtype=capacity.kv_dtype
        )
        predicted = roofline
        truth: StepTimeModel = perturbed(roofline, random.Random(f"{config.seed}/truth"), config.deviation)
        notes.append(f"true step times deviate by up to {config.deviation:.0%} a kind of operator from the roofline's")
    else:
        predicted = truth = load_step_time(Path(config.step_times))
        notes.append(f"step times are fitted to recorded steps ({config.step_times})")
    notes += [f"uncertain: {name} of {what.name}" for what in (model, hardware) for name in sorted(what.uncertain)]
    return _Costs(
        model=predicted,
        source=lambda rng: NoisyStepTime(truth, rng, config.noise),
        kv_tokens=config.kv_tokens or capacity.tokens,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
        host_gb_s=config.l2_gb_s or _host_gb_s(hardware, capacity.layout.gpus),
        max_model_len=min(config.max_model_len or model.max_length, config.kv_tokens or capacity.tokens_per_group),
        gpus=capacity.layout.gpus,
        dollars_per_hour=capacity.dollars_per_hour,
        top_k=model.top_k,
        vocab_size=model.vocab_size,
        notes=notes,
        settings={
            "model": model.name,
            "hardware": hardware.name,
            "layout": str(capacity.layout),
            "weights": capacity.weights_dtype,
            "kv": capacity.kv_dtype,
            "kv_tokens": config.kv_tokens or capacity.tokens,
        },
    )


def _capacity(config: SimulationConfig, model: ModelSpec) -> Capacity:
    deployment = Deployment(model, find_hardware(config.hardware))
    if config.layout is not None:
        layout = parse_layout(config.layout)
        if config.gpus_per_instance not in (None, layout.gpus):
            raise SimulationError(f"layout {layout} is of {layout.gpus} GPUs, not {config.gpus_per_instance}")
        return kv_capacity(deployment, layout)
    best = smallest_gpus(deployment)
    gpus = config.gpus_per_instance or best.layout.gpus
    try:  # an engine with one scheduler computes every request on all of its GPUs
        return kv_capacity(deployment, Layout(tp=gpus))
    except CostError:
        return best_layout(deployment, gpus)


def _host_gb_s(hardware: Hardware, gpus: int) -> float:
    """Every GPU copies its share of a block. Without a bus between them a copy reads and writes the one memory."""
    return hardware.memory_gb_s / 2 if hardware.pcie_gb_s is None else PCIE_EFFICIENCY * hardware.pcie_gb_s * gpus


def _tier_speeds(config: SimulationConfig, costs: _Costs, engine: EngineConfig, notes: list[str]) -> TierSpeeds | None:
    """Adds to the notes what they hold and how fast they are. Raises SimulationError."""
    if not engine.stages:
        return None
    page_bytes = round(costs.kv_bytes_per_token * config.block_size)
    try:
        slots = host_slots(engine, page_bytes)
    except ValueError as error:
        raise SimulationError(str(error)) from None
    notes.append(
        f"L2 of an instance holds {slots * config.block_size:,} tokens, at {costs.host_gb_s:.4g} GB/s and "
        f"{config.l2_latency_us:g} µs a copy"
    )
    if engine.l3 is not None:
        tokens = config.l3_capacity // page_bytes * config.block_size
        notes.append(
            f"L3 of the fleet holds {tokens:,} tokens, at {config.l3_gb_s:g} GB/s an instance and "
            f"{config.l3_latency_ms:g} ms a call"
        )
    notes.append("uncertain: speeds of L2 and L3")
    return TierSpeeds(
        page_bytes=page_bytes,
        host_bytes_per_s=costs.host_gb_s * 1e9,
        host_latency_s=config.l2_latency_us * 1e-6,
        store_bytes_per_s=config.l3_gb_s * 1e9,
        store_latency_s=config.l3_latency_ms * 1e-3,
        transfer_bytes_per_s=config.transfer_gb_s * 1e9,
        transfer_latency_s=config.transfer_latency_ms * 1e-3,
    )


def _fleet_spec(config: SimulationConfig, costs: _Costs, samples: Sequence[Sample]) -> FleetSpec:
    knobs = {name: getattr(config, name) for name in ENGINE_KNOBS}
    reports = config.separated or ROUTERS[config.routing](random.Random(0)).uses_cache
    if config.separated:
        knobs["kv_transfer"] = "shm"
    engine = EngineConfig.model_validate({"model": config.model, "report_cache": reports, **knobs})
    instance = InstanceSpec(
        engine=engine,
        num_blocks=max(2, costs.kv_tokens // config.block_size),
        max_model_len=costs.max_model_len,
        vocab_size=costs.vocab_size,
        start_phases=tuple((name, share * config.start_s) for name, share in START_PHASES),
        planning=PlanningCost(config.planning_step_us * 1e-6, config.planning_row_us * 1e-6),
        top_k=costs.top_k,
        tiers=_tier_speeds(config, costs, engine, costs.notes),
    )
    horizon = max(sample.arrival_s for sample in samples)
    return FleetSpec(
        instances=len(config.roles),
        instance=instance,
        times=costs.source,
        seed=config.seed,
        router=ROUTERS[config.routing],
        roles=config.roles if config.separated else (),
        pools=_pools(config),
        faults=_faults(config, horizon),
        gateway={
            "max_queue": config.max_queue,
            "silence_limit": config.silence_s,
            "slo": SloLimits(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3),
        },
        sample_every_s=config.sample_every_s or max(1.0, horizon / TIMELINE_POINTS),
    )


def _pools(config: SimulationConfig) -> Callable[[random.Random], PoolPolicy] | None:
    """They know the SLO and how fast transfers are."""
    if not config.separated:
        return None
    transfer = TransferCost(bytes_per_s=config.transfer_gb_s * 1e9, latency_s=config.transfer_latency_ms * 1e-3)
    settings = PoolSettings(tpot_slo_s=config.slo_tpot_ms * 1e-3, transfer=transfer)
    return partial(pool_policy, config.pools, config.prefill, config.decode, settings)


def _faults(config: SimulationConfig, horizon_s: float) -> FaultSchedule:
    text, instances, store = config.faults, len(config.roles), config.l3 is not None
    if text is None:
        return FaultSchedule()
    if not text.startswith("random:"):
        schedule = FaultSchedule.parse(text, instances)
        if schedule.needs_store and not store:
            raise FaultError("faults of the store need a store: give l3")
        return schedule
    try:
        seed, *count = (int(part) for part in text.split(":")[1:])
        (mean,) = count or [4]
    except ValueError:
        raise FaultError(f"{text!r} is not random:SEED or random:SEED:COUNT") from None
    return FaultSchedule.random(seed, instances, horizon_s, mean, store=store)
