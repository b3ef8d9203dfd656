"""From visits to results, and the JSON file that keeps them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.engines import FIGURES, Engine
from benchmarks.peers.visits import Visit
from benchmarks.peers.workload import Workload

FIELDS = (
    "ttft_512_ms",
    "ttft_4096_ms",
    "decode_tokens_per_s",
    "batch_output_tokens_per_s",
    "batch_total_tokens_per_s",
    "shared_output_tokens_per_s",
    "cold_start_s",
    "peak_rss_mb",
)
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "i8mm", "sve")


@dataclass
class Measured:
    """What a run found out about one engine.

    visits: those that took something. failure: why there are no (more) visits. left_out: figure to why it was not
    asked for."""

    engine: Engine
    visits: list[Visit] = field(default_factory=list)
    failure: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def result(self, figures: Sequence[str], measured_at: str) -> dict[str, Any]:
        """The medians over all visits; None for what was not taken."""
        values = {name: median_of(self.samples(name)) for name in FIELDS}
        if "batch" not in figures or values["batch_output_tokens_per_s"] is None:
            values["peak_rss_mb"] = None
        identity = {"engine": self.engine.title, "version": self.version()}
        return {**identity, "weights": self.engine.weights, **values, "measured_at": measured_at}

    def version(self) -> str | None:
        return next((visit.version for visit in reversed(self.visits) if visit.version), None)

    def samples(self, name: str) -> list[float]:
        if name == "peak_rss_mb":
            return [visit.peak_rss_mb for visit in self.visits if visit.peak_rss_mb is not None]
        return [value for visit in self.visits for value in visit.samples.get(name, [])]

    def missing(self) -> list[dict[str, str]]:
        reasons = dict(self.left_out)
        if self.failure is not None:
            reasons["later visits" if self.visits else "all"] = self.failure
        names = {"engine": self.engine.title, "weights": self.engine.weights}
        return [{**names, "figure": figure, "reason": reason} for figure, reason in reasons.items()]


def median_of(values: Sequence[float]) -> float | None:
    """The median with four significant digits; None of nothing."""
    return float(f"{median(values):.4g}") if values else None


def build_report(
    measured: Iterable[Measured], figures: Sequence[str], workload: Workload, prompts: str, measured_at: str
) -> dict[str, Any]:
    """The JSON object: machine, measured_at, results, and beside them what explains the results."""
    measured = list(measured)
    return {
        "machine": machine(),
        "measured_at": measured_at,
        "workload": {**asdict(workload), "prompts": prompts},
        "results": [m.result(figures, measured_at) for m in measured if m.visits],
        "not_measured": [entry for m in measured for entry in m.missing()],
        "samples": [
            {
                "engine": m.engine.title,
                "weights": m.engine.weights,
                "version": m.version(),
                "other_cores": [visit.other_cores for visit in m.visits],
                "first_tokens": next((visit.tokens for visit in m.visits if visit.tokens), []),
                **{name: [float(f"{value:.4g}") for value in m.samples(name)] for name in FIELDS},
            }
            for m in measured
            if m.visits
        ],
    }


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new`, completed from `old`: engines and figures that this run did not take keep what they had.

    Raises ValueError if the two cannot stand in one table: another machine, workload or prompts."""
    for key in ("machine", "workload"):
        if old.get(key) != new[key]:
            raise ValueError(f"{key} differs: {old.get(key)} then, {new[key]} now")
    kept, fresh = ({_key(entry): entry for entry in report["results"]} for report in (old, new))
    failed = {_key(entry) for entry in new["not_measured"] if entry["figure"] == "all"}
    results = [_combined(kept.get(key), result) for key, result in fresh.items()]
    results += [result for key, result in kept.items() if key not in fresh.keys() | failed]
    samples = {_key(entry): entry for entry in old["samples"] if _key(entry) not in failed}
    samples |= {_key(entry): _combined(samples.get(_key(entry)), entry) for entry in new["samples"]}
    return {
        **new,
        "results": results,
        "not_measured": new["not_measured"] + [entry for entry in old["not_measured"] if _stands(entry, results, new)],
        "samples": list(samples.values()),
    }


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["engine"], entry["weights"]


def _combined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Figures of another version are not carried over."""
    if old is None or old["version"] != new["version"]:
        return new
    return {name: old.get(name) if value in (None, []) else value for name, value in new.items()}


def _stands(entry: dict[str, Any], results: list[dict[str, Any]], new: dict[str, Any]) -> bool:
    """Whether a figure that was missing in an earlier run is missing still."""
    if entry["figure"] not in FIGURES:
        return _key(entry) not in {_key(e) for e in (*new["results"], *new["not_measured"])}
    if any(_key(e) == _key(entry) and e["figure"] in ("all", entry["figure"]) for e in new["not_measured"]):
        return False
    field_name = FIGURES[entry["figure"]][0]
    return any(_key(result) == _key(entry) and result[field_name] is None for result in results)


def read_report(path: Path) -> dict[str, Any] | None:
    """A report written earlier, None if there is none. Raises ValueError for a file that is something else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    lists = ("results", "not_measured", "samples")
    if not isinstance(report, dict) or not all(isinstance(report.get(name), list) for name in lists):
        raise ValueError("it is not a report of this program")
    return report


def write_report(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What figures depend on: processor, its instruction sets, cores, memory, system."""
    info = cpu_info()
    flags = (info.get("flags") or info.get("Features") or "").split()
    family = " ".join(f"{key} {info[key]}" for key in ("cpu family", "model") if key in info)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": f"{info.get('model name', platform.processor() or platform.machine())} ({family})",
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "cores": cores(),
        "memory_gib": round(pages / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_info() -> dict[str, str]:
    """/proc/cpuinfo of one core, such as vendor_id and flags; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
