"""Made-up results of simulated runs, for what is made of results: summaries, tables, pages."""

from __future__ import annotations

import math
import random

from kllm.simulation.results import FleetResult, InstanceSample, RequestOutcome
from kllm.telemetry.tier_counts import TierCounts


def make_outcomes(rng: random.Random, requests: int, seconds: float) -> list[RequestOutcome]:
    """Poisson-like arrivals; long prompts wait longer, cached ones less; one in forty ends badly."""
    outcomes = []
    for index, arrival in enumerate(sorted(rng.uniform(0, seconds) for _ in range(requests))):
        prompt = min(128_000, 1 + int(rng.lognormvariate(8.5, 1.2)))
        cached = prompt // 512 * 512 if rng.random() < 0.4 else 0
        output = 1 + int(rng.expovariate(1 / 300))
        ttft = 0.05 + (prompt - cached) / 30_000 + rng.expovariate(4) * rng.choice((0.2, 0.2, 4))
        tpot = rng.lognormvariate(-3.6, 0.25) if output > 1 else None
        outcome = RequestOutcome(index, arrival, prompt, output, cached, ttft, tpot, ending="completed")
        outcome.end_s = arrival + ttft + (tpot or 0.0) * (output - 1)
        if rng.random() < 0.025:
            outcome.ending = rng.choice(("error", "abort", "refused"))
            outcome.detail = "the queue is full" if outcome.ending == "refused" else ""
            outcome.ttft_s = outcome.tpot_s = None
            outcome.output_tokens = outcome.cached_tokens = 0
            outcome.end_s = arrival + rng.random()
        outcome.attempts = 2 if rng.random() < 0.01 else 1
        outcomes.append(outcome)
    return outcomes


def make_samples(rng: random.Random, instances: int, seconds: int, down: range = range(0)) -> list[InstanceSample]:
    """A sample a second; instance 1 is down in the seconds `down`."""
    samples = []
    for second in range(seconds + 1):
        for instance in range(instances):
            wave = 0.5 + 0.45 * math.sin(second / seconds * 6 + instance)
            running = int(40 * wave + rng.uniform(0, 8))
            waiting = max(0, int(rng.gauss(25 * wave - 14, 4)))
            kv_usage = min(1.0, 0.1 + 0.8 * wave + rng.uniform(-0.05, 0.1))
            busy = min(1.0, 0.3 + 0.7 * wave)
            sample = InstanceSample(float(second), instance, True, running, waiting, kv_usage, busy, 20.0, 300.0)
            if instance == 1 and second in down:
                sample = InstanceSample(float(second), instance, False, 0, 0, 0.0, 0.0, 0.0, 0.0)
            samples.append(sample)
    return samples


def add_tiers(result: FleetResult) -> FleetResult:
    """Half of what was cached came from L2 and a quarter from L3, more and more of it."""
    for sample in result.samples:
        if sample.up:
            sample.looked_up = 10_000
            sample.hits = (1000, 10 * int(sample.time_s), 5 * int(sample.time_s))
    result.hits = (1000, 2000, 1000)
    result.wasted = 17
    result.tiers = TierCounts(l1_evicted=9000, l1_lost=12, l2_blocks=800, l2_capacity=1000, saved=8500, loaded=4321)
    result.tiers.fetched, result.tiers.bytes_fetched, result.tiers.fetch_s = 1234, 4_321_000_000, 1.5
    result.tiers.lookups, result.tiers.lookup_s, result.tiers.late = 500, 5.0, 3
    return result


def make_result(instances: int = 4, requests: int = 500, seconds: int = 300, seed: int = 0) -> FleetResult:
    rng = random.Random(seed)
    down = range(seconds // 3, seconds // 2)
    return FleetResult(
        outcomes=make_outcomes(rng, requests, seconds),
        samples=make_samples(rng, instances, seconds, down),
        decision_hash="c0ffee" * 8,
        simulated_s=seconds + 12.5,
        wall_s=7.25,
        steps=40_000,
        gpus=8 * instances,
        restarts=1,
        preemptions=3,
        yields=1234,
        most_yields=56,
        quota_tokens=78_000,
        overtakes=9,
        chunk_tokens=8192,
        trace_load=0.31,
        load=0.8,
        cost_per_gpu_hour=3.5,
        settings={"model": "glm-5.2", "hardware": "h200", "instances": instances, "seed": seed, "slo_ttft_ms": 2000},
        notes=["Arrivals run 2.58 times faster than in the trace (--load 0.8).", "Token ids are made from block ids."],
        faults=[f"{down.start} crash 1", f"{seconds * 0.7:g} slow 2 for 20 by 4"],
    )
