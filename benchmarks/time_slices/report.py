"""The figures as tables and as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = {
    "rate": "req/s",
    "tokens_per_s": "tok/s",
    "itl_p99_ms": "ITL P99",
    "itl_max_ms": "longest",
    "tpot_p50_ms": "TPOT P50",
    "tpot_p99_ms": "P99 ms",
    "ttft_p50_s": "TTFT P50",
    "ttft_p99_s": "P99 s",
}
_CURVES = {"itl_p99_ms": "P99 time between tokens, ms", "ttft_p50_s": "P50 TTFT, s"}
_LABELS = {"chunk": "chunked prefill, {} tokens", "target": "slices, target {} ms"}


def print_figures(kept: dict[str, Any], console: Console) -> None:
    for part in kept.values():
        found = part["dominated"]
        table = Table(title=f"{part['machine_simulated']}: {found['share']:.0%} of chunked prefill's points dominated")
        table.add_column("", no_wrap=True)
        for title in _COLUMNS.values():
            table.add_column(title, no_wrap=True, justify="right")
        for name, line in part["points"].items():
            for point in line:
                table.add_row(name, *(f"{point[key]:.4g}" for key in _COLUMNS))
        console.print(table)
        if found["not"]:
            console.print(f"not dominated: {', '.join(found['not'])}")


def draw(kept: dict[str, Any], path: Path) -> None:
    """P99 time between tokens and median TTFT, against throughput. Nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not kept:
        return
    figure = Figure(figsize=(6.2 * len(kept), 8.0))
    axes = figure.subplots(2, len(kept), squeeze=False)
    for column, part in enumerate(kept.values()):
        for row, (key, title) in enumerate(_CURVES.items()):
            _curves(axes[row][column], part["points"], key)
            axes[row][column].set_ylabel(title)
        axes[0][column].set_title(part["machine_simulated"])
        axes[1][column].set_xlabel("output tokens a second")
        axes[1][column].legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _curves(axes: Any, points: dict[str, list[dict[str, float]]], key: str) -> None:
    shades = {kind: sum(name.startswith(kind) for name in points) for kind in ("chunk", "target")}
    drawn = dict.fromkeys(shades, 0)
    for name, line in points.items():
        kind = name.split()[0]
        drawn[kind] += 1
        shade = 0.35 + 0.65 * drawn[kind] / shades[kind]
        colour = (0.5, 0.5, 0.5, shade) if kind == "chunk" else (0.80, 0.25, 0.1, shade)
        label = _LABELS[kind].format(name.split()[1])
        axes.plot([p["tokens_per_s"] for p in line], [p[key] for p in line], "o-", color=colour, label=label, ms=4)
    values = [point[key] for line in points.values() for point in line]
    if max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
