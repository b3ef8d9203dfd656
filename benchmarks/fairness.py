"""What long prompts do to everybody else: fair chunked prefill and skip-ahead admission against first come.

    python benchmarks/fairness.py                      all parts, about 25 minutes; `real` needs a quiet machine
    python benchmarks/fairness.py --parts plan,f2      some of them
    python benchmarks/fairness.py --json               the figures on standard output, tables on standard error
    python benchmarks/fairness.py --parts "" --json    what was measured last

    plan     Scheduler.plan with 256 requests running and 1,000 waiting
    virtual  GLM-5.2 in virtual time: a recorded load at 0.8 of saturation beside prompts of 600,000 to 900,000 tokens
    f2       admission alone, in virtual time: a KV cache so small that long prompts do not fit at once
    sweep    in virtual time, the parameters of fairness under the load that `real` sends to the real engine
    real     the real engine: bursts of short prompts with 3 % long ones, both policies in turns

Each part replaces its own figures in benchmarks/results/fairness.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks import parts
from benchmarks.long_prompts import blocked, planning, real, sweep, virtual
from benchmarks.long_prompts.report import print_figures

PARTS: dict[str, Callable[[Progress], dict[str, Any]]] = {
    "plan": planning.measure,
    "virtual": virtual.measure,
    "f2": blocked.measure,
    "sweep": sweep.measure,
    "real": real.measure,
}


def summary(kept: dict[str, Any]) -> dict[str, Any]:
    """The promised figures first, None where they have not been measured; then all of every part."""
    return {
        "ttft_change": kept.get("real", {}).get("ttft_change"),
        "throughput_change": kept.get("real", {}).get("throughput_change"),
        "plan_ms": kept.get("plan", {}).get("plan_ms"),
        **kept,
    }


if __name__ == "__main__":
    parts.main(__doc__, PARTS, "fairness.json", summary, print_figures)
