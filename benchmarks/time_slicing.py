"""Time-sliced separation on one instance against chunked prefill: P99 time between tokens against throughput.

    python benchmarks/time_slicing.py               both parts, a few minutes
    python benchmarks/time_slicing.py --parts gpu
    python benchmarks/time_slicing.py --json        the figures on standard output, tables on standard error
    python benchmarks/time_slicing.py --parts "" --json     what was measured last

    gpu         GLM-5.2 on 8 H200 (roofline), chats with long prompts among them
    processor   SmolLM2 on two cores (step times fitted to the real engine)

In virtual time, with the production scheduler. Every chunk and every target serves the same requests at the same rates,
the last of which is more than can be served. Figures are kept in benchmarks/results/time_slicing.json, and drawn beside
it where matplotlib is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path

from benchmarks import parts
from benchmarks.time_slices import loads
from benchmarks.time_slices.report import draw, print_figures
from benchmarks.time_slices.sweep import measure

PARTS: dict[str, Callable[[Progress], dict[str, Any]]] = {
    "gpu": lambda progress: measure(loads.gpu(), progress),
    "processor": lambda progress: measure(loads.processor(), progress),
}


def summary(kept: dict[str, Any]) -> dict[str, Any]:
    """The share of chunked prefill's points that are dominated comes first."""
    dominated = {name: kept[name]["dominated"]["share"] for name in PARTS if name in kept}
    return {"dominated_share": dominated, **kept}


def show(kept: dict[str, Any], console: Any) -> None:
    print_figures(kept, console)
    draw(kept, parts.RESULTS / "time_slicing.png")


if __name__ == "__main__":
    parts.main(__doc__, PARTS, "time_slicing.json", summary, show)
