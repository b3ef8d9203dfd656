"""Prefill and Decode Pools in virtual time: GLM-5.2 on 8 H200 an instance, 4 P and 4 D.

    python benchmarks/pools.py                        all parts, about 20 minutes of one core
    python benchmarks/pools.py --parts phases         some of them
    python benchmarks/pools.py --json                 the figures on standard output, tables on standard error
    python benchmarks/pools.py --parts "" --json      what was measured last

    phases     bursts of long prompts, then of long outputs: global pools against fixed groups, P and D chosen together,
               any D, always separated, and 8 instances that do both. A load is the share of what the busy side of each
               phase can do with its steps within the SLO
    location   conversations over slow links: D chosen with and without regard to where KV is and what bringing it costs

Goodput: requests a second within TTFT 1 s and TPOT 18 ms. Figures are means over the seeds. Each part replaces its own
figures in benchmarks/results/pools.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks import parts
from benchmarks.pd_pools import location, phases
from benchmarks.pd_pools.report import print_figures

PARTS: dict[str, Callable[[Progress], dict[str, Any]]] = {"phases": phases.measure, "location": location.measure}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """How many times the goodput of each kind of fleet global pools have at 0.9; then all of every part."""
    short: dict[str, Any] = {"goodput_gain_at_0.9": None}
    if (measured := results.get("phases")) is not None:
        at = {name: one["goodput_rps"] for name, one in measured["by_load"]["0.9"].items()}
        ours = at.pop("global pools")
        short["goodput_gain_at_0.9"] = {name: round(ours / other, 3) for name, other in at.items()}
    return short | results


if __name__ == "__main__":
    parts.main(__doc__, PARTS, "pools.json", summary, print_figures)
