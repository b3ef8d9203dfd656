"""Hit rate when what instances say about their caches comes late, or not at all. All other messages arrive.

What was just routed is expected where it was sent for a minute or two, whatever is reported: so the sessions here pause
for longer than that, and caches are so small that they evict.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cache_routing import agentic
from benchmarks.cache_routing.runs import figures
from kllm.simulation.config import SimulationConfig
from kllm.simulation.fabric import Weather
from kllm.simulation.run import simulate

KNOBS: dict[str, Any] = {"instances": 8, "num_prompts": 400, "load": 0.9, "routing": "cache-aware", "start_s": 1.0}
KNOBS |= {"kv_tokens": 300_000}  # half of what fits: what is evicted has to be told too
PAUSE_S = 600.0
CASES = {
    "all in time": Weather(),
    "1 % lost": Weather(report_loss=0.01),
    "10 % lost": Weather(report_loss=0.1),
    "0.1 s late": Weather(report_late_s=0.1),
    "1 s late": Weather(report_late_s=1.0),
    "10 s late": Weather(report_late_s=10.0),
    "10 % lost, 1 s late": Weather(report_loss=0.1, report_late_s=1.0),
    "none come": Weather(report_loss=1.0),
}


def measure(console: Console) -> dict[str, Any]:
    """By case: hit rate, mean time to first token, gaps found."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agentic.jsonl"
        agentic.write_slice(path, KNOBS["num_prompts"], PAUSE_S)
        config = SimulationConfig.model_validate(KNOBS | {"trace": str(path)})
        for name, weather in CASES.items():
            with console.status(name):
                result = simulate(config, weather=weather)
            one = figures(result)
            found[name] = {
                "hit_rate": round(one["hit_rate"], 4),
                "ttft_mean_s": round(one["ttft_mean_s"], 4),
                "gaps": result.cache_gaps,
            }
    _show(found, console)
    return {"trace": agentic.NAME, **KNOBS, "cases": found}


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(title="reports of caches that come late or not at all", title_justify="left")
    for column in ("reports", "hit rate", "mean TTFT, s", "gaps found"):
        table.add_column(column, justify="left" if column == "reports" else "right")
    for name, one in found.items():
        table.add_row(name, f"{one['hit_rate']:.1%}", f"{one['ttft_mean_s']:.2f}", str(one["gaps"]))
    console.print(table)
