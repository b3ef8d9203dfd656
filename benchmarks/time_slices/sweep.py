"""Chunks and targets, each at every rate: what clients saw, and which of it is dominated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.time_slices.engine import Client, serve
from benchmarks.time_slices.loads import Scenario
from kllm.config import EngineConfig
from kllm.telemetry.statistics import Slo, percentile

CHUNKS = (128, 256, 512, 1024, 2048)
SEEDS = (0,)
SLO = Slo(ttft_ms=4000.0, tpot_ms=60.0)  # as kllm simulate has it
SAME = 0.995  # of a throughput counts as the same


def measure(scenario: Scenario, progress: Progress) -> dict[str, Any]:
    """Points by name: chunk of so many tokens, or target of so many ms; one for each rate, means over the seeds."""
    kinds = {f"chunk {chunk}": {"max_num_batched_tokens": chunk} for chunk in CHUNKS}
    kinds |= {
        f"target {target:g}": {"max_num_batched_tokens": scenario.step_tokens, "tpot_target_ms": target}
        for target in scenario.targets_ms
    }
    task = progress.add_task(scenario.machine.name, total=len(kinds) * len(scenario.rates) * len(SEEDS))
    points: dict[str, list[dict[str, float]]] = {}
    for name, knobs in kinds.items():
        config = EngineConfig(
            model="simulated", block_size=scenario.block_size, max_num_seqs=scenario.max_num_seqs, **knobs
        )
        for rate in scenario.rates:
            runs = []
            for seed in SEEDS:
                runs.append(figures(serve(scenario.machine, config, scenario.samples(rate, seed), seed)))
                progress.advance(task)
            mean = {key: float(f"{sum(run[key] for run in runs) / len(runs):.4g}") for key in runs[0]}
            points.setdefault(name, []).append({"rate": rate} | mean)
    return {
        "machine_simulated": scenario.machine.name,
        "seeds": len(SEEDS),
        "points": points,
        "dominated": dominated(points),
    }


def figures(clients: Sequence[Client]) -> dict[str, float]:
    """Times in milliseconds but for TTFT, which is in seconds; rates per second."""
    gaps = sorted(b - a for client in clients for a, b in zip(client.tokens, client.tokens[1:], strict=False))
    tpots = sorted(client.tpot for client in clients if client.tpot is not None)
    ttfts = sorted(client.ttft for client in clients)
    seconds = max(client.tokens[-1] for client in clients) - min(client.arrived for client in clients)
    good = sum(SLO.met_by(client.ttft, client.tpot) for client in clients)
    return {
        "tokens_per_s": sum(len(client.tokens) for client in clients) / seconds,
        "goodput_rps": good / seconds,
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
        "itl_p999_ms": 1e3 * percentile(gaps, 99.9),
        "itl_max_ms": 1e3 * gaps[-1],
        "tpot_p50_ms": 1e3 * percentile(tpots, 50),
        "tpot_p99_ms": 1e3 * percentile(tpots, 99),
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
    }


def dominated(points: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Points of chunked prefill for which some target gives the same throughput or more, and a P99 time between tokens
    that is no longer; and those for which none does."""
    ours = [point for name, line in points.items() if name.startswith("target") for point in line]
    theirs = [(name, point) for name, line in points.items() if name.startswith("chunk") for point in line]
    left = [
        f"{name} at {point['rate']:g}/s"
        for name, point in theirs
        if not any(
            own["tokens_per_s"] >= SAME * point["tokens_per_s"] and own["itl_p99_ms"] <= point["itl_p99_ms"]
            for own in ours
        )
    ]
    return {"share": round(1 - len(left) / len(theirs), 3), "not": left}
