"""Small simulated fleets under load and faults, for tests that run many of them."""

from __future__ import annotations

import random
from typing import Any

from kllm.config import EngineConfig
from kllm.costs.step import StepWork
from kllm.messages import Role
from kllm.simulation.executor import PlanningCost
from kllm.simulation.faults import FaultSchedule
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.launcher import InstanceSpec, TierSpeeds
from kllm.simulation.results import FleetResult
from kllm.workload.sample import BLOCK, OWN, Sample, TokenSource

VOCAB_SIZE = 1000
HORIZON_S = 20.0
PAGE_BYTES = 1 << 20
POOLS: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")


class LinearTimes:
    """5 ms a step, 0.2 ms a row, 20 µs a token, and noise."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self, work: StepWork) -> float:
        return (5e-3 + 2e-4 * work.rows + 2e-5 * work.new_tokens) * self._rng.uniform(0.9, 1.1)


def small_instance(**engine: Any) -> InstanceSpec:
    """An instance whose KV is short: about four requests of the load below fit."""
    knobs = {"block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 128, "pipeline_depth": 2} | engine
    return InstanceSpec(
        engine=EngineConfig(model="simulated", **knobs),
        num_blocks=48,
        max_model_len=400,
        vocab_size=VOCAB_SIZE,
        start_phases=(("process", 0.1), ("weights", 0.4)),
        planning=PlanningCost(1e-4, 1e-5),
        tiers=TierSpeeds(
            PAGE_BYTES, host_bytes_per_s=2e9, host_latency_s=1e-4, store_bytes_per_s=1e9, store_latency_s=2e-3
        ),
    )


def tier_knobs(seed: int) -> dict[str, Any]:
    """Lower tiers of some kind, of two seeds in three; their store is none for two in five of those."""
    rng = random.Random(f"tiers/{seed}")
    if seed % 3 == 0:
        return {}
    return {
        "l2_memory": rng.choice((0, 4, 30, 200)) * PAGE_BYTES if seed % 5 > 1 else 40 * PAGE_BYTES,
        "l2_write": rng.choice(("through", "through", "selective", "back")),
        "l3": "shared" if seed % 5 > 1 else None,
        "l3_capacity": rng.choice((20, 100, 1000)) * PAGE_BYTES,
        "cache_eviction": rng.choice(("lru", "value")),
        "l3_min_reuse": rng.choice((1, 1, 2)),
        "fetch": rng.choice(("always", "always", "predicted")),
        "fetch_base_s": rng.choice((0.01, 0.25)),
    }


def small_load(seed: int, count: int = 250, horizon_s: float = HORIZON_S) -> list[Sample]:
    """Prompts of 4 to 200 tokens, half of them with one of four shared prefixes, some as later turns of others."""
    rng = random.Random(f"load/{seed}")
    samples: list[Sample] = []
    for index in range(count):
        shared = (((BLOCK, rng.randrange(4)), rng.choice((16, 40, 64))),) if rng.random() < 0.5 else ()
        parts = (*shared, ((OWN, index), rng.choice((4, 9, 30, 100))))
        output = rng.choice((1, 2, 10, 40, 80))
        if index > 10 and rng.random() < 0.2:
            samples.append(Sample(parts, output, rng.uniform(0.0, 1.0), after=rng.randrange(index)))
        else:
            samples.append(Sample(parts, output, rng.uniform(0.0, horizon_s)))
    return samples


def impatience(seed: int) -> Any:
    """Every tenth client leaves within a second."""

    def patience_s(index: int) -> float | None:
        rng = random.Random(f"patience/{seed}/{index}")
        return rng.uniform(0.0, 1.0) if rng.random() < 0.1 else None

    return patience_s


def faulty_fleet(seed: int, *, faults: FaultSchedule | None = None, instances: int = 4, **spec: Any) -> FleetSpec:
    """Four small instances and about four faults, all from one seed. Faults are forgiven for as long as they last.

    Of one seed in four they are a Prefill and a Decode Pool."""
    knobs, roles = tier_knobs(seed), POOLS if seed % 4 == 1 and instances == len(POOLS) else ()
    if roles:
        room = random.Random(f"pools/{seed}").choice((8, 30, 200))
        knobs |= {"kv_transfer": "shm", "transfer_memory": room * PAGE_BYTES}
    instance = small_instance(**knobs)
    store = instance.engine.l3 is not None
    schedule = FaultSchedule.random(seed, instances, HORIZON_S, store=store) if faults is None else faults
    return FleetSpec(
        instances=instances,
        instance=instance,
        times=LinearTimes,
        seed=seed,
        roles=roles,
        faults=schedule,
        gateway={"silence_limit": 3.0, "max_attempts": 30, "max_restarts": 1000, "max_outage": 1e6},
        patience_s=impatience(seed),
        **spec,
    )


def run_faulty(seed: int, **spec: Any) -> FleetResult:
    """Raises AssertionError when anything is lost or repeated."""
    return run_fleet(faulty_fleet(seed, **spec), small_load(seed), TokenSource(seed, VOCAB_SIZE))
