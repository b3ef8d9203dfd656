"""One simulated run and its figures; and the runs so far, kept line by line, so that an interruption loses none."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cache_routing import agentic
from kllm.simulation.config import SimulationConfig
from kllm.simulation.results import FleetResult
from kllm.simulation.run import simulate
from kllm.simulation.summary import summarise
from kllm.telemetry.statistics import Slo

SLO = Slo(ttft_ms=4000.0, tpot_ms=60.0)
FIGURES = ("hit_rate", "ttft_mean_s", "ttft_p95_s", "goodput_rps", "slo_share", "tpot_p95_s", "requests_per_s")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. trace: a name, a file, or `agentic`. load: share of the saturation of a fleet dealt out in turn."""

    trace: str
    instances: int
    requests: int
    load: float
    router: str
    seed: int


def run_once(run: Run, **knobs: Any) -> dict[str, float]:
    """Its figures. knobs: further ones of the simulation."""
    gc.set_threshold(100_000, 50, 50)  # a simulation makes many objects and few cycles
    with tempfile.TemporaryDirectory() as folder:
        trace = run.trace
        if trace == agentic.NAME:
            trace = str(Path(folder) / "agentic.jsonl")
            agentic.write_slice(Path(trace), run.requests)
        config = {
            "trace": trace,
            "instances": run.instances,
            "num_prompts": run.requests,
            "load": run.load,
            "routing": run.router,
            "seed": run.seed,
            "start_s": 1.0,
        }
        return figures(simulate(SimulationConfig.model_validate(config | knobs)))


def figures(result: FleetResult) -> dict[str, float]:
    """Goodput is the share within the SLO of the rate that was asked for, not of the time that the run took: how long
    the last request or session goes on says nothing of a router."""
    report = summarise(result, SLO)
    share, saturation_rps = report["slo"]["share"], result.settings["saturation_rps"]
    assert result.load is not None
    assert isinstance(saturation_rps, float)
    return {
        "hit_rate": sum(report["hit_rate"].values()),
        "ttft_mean_s": report["ttft_s"]["mean"],
        "ttft_p95_s": report["ttft_s"]["p95"],
        "goodput_rps": share * result.load * saturation_rps,
        "slo_share": share,
        "tpot_p95_s": report["tpot_s"]["p95"],
        "requests_per_s": report["requests_per_s"],
    }


class RunLog:
    """A file of finished runs, one JSON object a line: the fields of Run and of its figures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[Run, dict[str, float]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._runs[msgspec.convert({name: row[name] for name in Run.__struct_fields__}, Run)] = {
                    name: row[name] for name in FIGURES
                }

    def get(self, run: Run) -> dict[str, float] | None:
        return self._runs.get(run)

    def add(self, run: Run, found: dict[str, float]) -> None:
        self._runs[run] = found
        rounded = {name: round(value, 5) for name, value in found.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(msgspec.to_builtins(run) | rounded) + "\n")

    def drop(self, routers: set[str]) -> None:
        """Forget the runs of these routers."""
        self._runs = {run: found for run, found in self._runs.items() if run.router not in routers}
        lines = [json.dumps(msgspec.to_builtins(run) | found) + "\n" for run, found in self._runs.items()]
        self._path.write_text("".join(lines), encoding="utf-8")
