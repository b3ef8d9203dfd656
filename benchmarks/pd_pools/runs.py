"""One simulated run, and its figures."""

from __future__ import annotations

import statistics
from typing import Any

from kllm.simulation.config import SimulationConfig
from kllm.simulation.run import simulate
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo

SLO = {"slo_ttft_ms": 1000.0, "slo_tpot_ms": 18.0}

Figures = dict[str, float]


def one_run(config: SimulationConfig) -> Figures:
    """worst_waiting: requests that wait at the instance where most do, mean over time; of P's (or all), and of D's.
    slo_share: of all requests."""
    report = summarise(simulate(config), Slo(config.slo_ttft_ms, config.slo_tpot_ms))
    waiting: list[float] = [figures["waiting"] for figures in report["instances"]]
    split = config.prefill or len(waiting)
    return {
        "goodput_rps": report["goodput_rps"],
        "slo_share": report["slo"]["share"],
        "ttft_mean_s": report["ttft_s"]["mean"],
        "ttft_p95_s": report["ttft_s"]["p95"],
        "tpot_mean_s": report["tpot_s"]["mean"],
        "tpot_p95_s": report["tpot_s"]["p95"],
        "hit_rate": sum(report["hit_rate"].values()),
        "worst_waiting_prefill": max(waiting[:split]),
        "worst_waiting_decode": max(waiting[split:], default=0.0),
        "pulled_gb": report["tiers"]["bytes_pulled"] / 1e9 if report["tiers"] is not None else 0.0,
        "utilisation": report["utilisation"],
    }


def means(runs: list[Figures]) -> dict[str, Any]:
    """Means over the runs, one for each seed, and the least and greatest goodput."""
    figures: dict[str, Any] = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}
    goodput = [run["goodput_rps"] for run in runs]
    return figures | {"seeds": len(runs), "goodput_range": [round(min(goodput), 4), round(max(goodput), 4)]}
