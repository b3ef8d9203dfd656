"""What lower tiers of the KV cache bring, and what they cost.

    python benchmarks/tiers.py                       all parts, about 25 minutes; `real` needs a quiet machine
    python benchmarks/tiers.py --parts virtual       some of them
    python benchmarks/tiers.py --json                the figures on standard output, tables on standard error
    python benchmarks/tiers.py --parts "" --json     what was measured last

    real      conversations on the real engine, L1 a quarter of what they reuse: L1 only, + L2, + L3, after a restart,
              two instances with one store; the rate at equal p95 TTFT; L1 swept from a tenth to all
    virtual   recorded traces on a simulated instance of GLM-5.2: the same table beside an infinite cache
    bubbles   time between steps, over prompts of a million tokens, and on the real engine with and without
              incremental matching

Each part replaces its own figures in benchmarks/results/tiers.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks import parts
from benchmarks.kv_tiers import bubbles, pays, virtual
from benchmarks.kv_tiers.report import print_figures

PARTS: dict[str, Callable[[Progress], dict[str, Any]]] = {
    "real": pays.measure,
    "virtual": virtual.measure,
    "bubbles": bubbles.measure,
}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that others read by name, None where they have not been measured; then all of every part."""
    names = ("hit_rate", "infinite_cache_hit_rate", "hit_rate_gain_points", "rate_gain_at_equal_p95", "bubble_p99_ms")
    short: dict[str, Any] = dict.fromkeys(names)
    if (real := results.get("real")) is not None:
        short["hit_rate"] = {name: run["hit_rate"] for name, run in real["runs"].items()}
        short |= {name: real[name] for name in names[1:4]}
    if (between := results.get("bubbles")) is not None:
        short["bubble_p99_ms"] = between["all_tiers"]["p99_ms"]
    return short | results


if __name__ == "__main__":
    parts.main(__doc__, PARTS, "tiers.json", summary, print_figures)
