"""Tables of the figures."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("goodput, 1/s", "in SLO", "TTFT p95, s", "TPOT p95, ms", "most waiting P", "D", "hit rate", "pulled, GB")


def print_figures(results: dict[str, Any], console: Console) -> None:
    for title, kinds in (("phases", "by_load"), ("location", "by_speed")):
        if title not in results:
            continue
        table = Table(title=title, title_justify="left")
        for column in (kinds.removeprefix("by_"), "fleet"):
            table.add_column(column)
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for key, by_fleet in results[title][kinds].items():
            for name, one in by_fleet.items():
                table.add_row(key, name, *_cells(one))
        console.print(table)


def _cells(one: dict[str, Any]) -> list[str]:
    low, high = one["goodput_range"]
    return [
        f"{one['goodput_rps']:.2f} ({low:.2f} to {high:.2f})",
        f"{one['slo_share']:.1%}",
        f"{one['ttft_p95_s']:.2f}",
        f"{1000 * one['tpot_p95_s']:.1f}",
        f"{one['worst_waiting_prefill']:.2f}",
        f"{one['worst_waiting_decode']:.2f}",
        f"{one['hit_rate']:.1%}",
        f"{one['pulled_gb']:.1f}",
    ]
