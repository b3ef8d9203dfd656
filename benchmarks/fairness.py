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

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks.long_prompts import blocked, planning, real, sweep, virtual
from benchmarks.long_prompts.report import print_figures
from benchmarks.peers.results import machine
from benchmarks.simulation_accuracy.real import ServerFailed

PARTS: dict[str, Callable[[Progress], dict[str, Any]]] = {
    "plan": planning.measure,
    "virtual": virtual.measure,
    "f2": blocked.measure,
    "sweep": sweep.measure,
    "real": real.measure,
}
RESULTS = Path(__file__).parent / "results" / "fairness.json"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps the figures")
    arguments = parser.parse_args()
    arguments.parts = [part for part in arguments.parts.split(",") if part]
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return arguments


def summary(kept: dict[str, Any]) -> dict[str, Any]:
    """The promised figures first, None where they have not been measured; then all of every part."""
    return {
        "ttft_change": kept.get("real", {}).get("ttft_change"),
        "throughput_change": kept.get("real", {}).get("throughput_change"),
        "plan_ms": kept.get("plan", {}).get("plan_ms"),
        **kept,
    }


def run(parts: list[str], path: Path, console: Console) -> dict[str, Any]:
    """The figures that are kept, those of these parts measured now. Raises ServerFailed, OSError, ValueError."""
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for part in parts:
            facts = {"machine": machine(), "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
            kept[part] = PARTS[part](progress) | facts
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept


def main() -> None:
    arguments = parse()
    console = Console(stderr=True)
    try:
        kept = run(arguments.parts, arguments.results, console)
    except (ServerFailed, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print_figures(kept, console)
    if arguments.json:
        print(json.dumps(summary(kept)))


if __name__ == "__main__":
    main()
