"""Results for people: a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_COLUMNS = {
    "ttft_512_ms": ("TTFT 512\nms", "{:,.0f}"),
    "ttft_4096_ms": ("TTFT 4096\nms", "{:,.0f}"),
    "decode_tokens_per_s": ("one stream\ntok/s", "{:.1f}"),
    "batch_output_tokens_per_s": ("batch out\ntok/s", "{:.0f}"),
    "batch_total_tokens_per_s": ("batch total\ntok/s", "{:,.0f}"),
    "shared_output_tokens_per_s": ("shared out\ntok/s", "{:.0f}"),
    "cold_start_s": ("cold\ns", "{:.1f}"),
    "peak_rss_mb": ("memory\nMiB", "{:,.0f}"),
}
_LESS_IS_BETTER = {"ttft_512_ms", "ttft_4096_ms", "cold_start_s", "peak_rss_mb"}
_BUSY = 0.2  # cores that others keep busy before the table says so


def print_report(report: dict[str, Any], console: Console) -> None:
    """One row an engine, the best figure of each column in bold; below it what is missing, and why."""
    work = report["workload"]
    title = f"{work['batch']} × ({work['prompt']} in + {work['output']} out), {report['measured_at']}"
    table = Table(title=title, title_justify="left")
    for name in ("engine", "version", "weights"):
        table.add_column(name)
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right")
    best = {name: _best(report["results"], name) for name in _COLUMNS}
    for result in report["results"]:
        cells = [_cell(result[name], form, best[name]) for name, (_, form) in _COLUMNS.items()]
        table.add_row(result["engine"], result["version"] or "?", result["weights"], *cells)
    for entry in report["not_measured"]:
        if entry["figure"] == "all":
            row = [entry["engine"], "", entry["weights"], *["✗"] * len(_COLUMNS)]
            table.add_row(*row, style="red")
    console.print(table)
    for entry in report["not_measured"]:
        what = "not measured" if entry["figure"] == "all" else f"{entry['figure']} not measured"
        console.print(f"{escape(entry['engine'])} {entry['weights']}: {what}: {escape(entry['reason'])}", style="dim")
    _print_noise(report, console)


def _print_noise(report: dict[str, Any], console: Console) -> None:
    disturbed = {f"{s['engine']} {s['weights']}": max(s["other_cores"], default=0.0) for s in report["samples"]}
    busy = [f"{name} {cores:.2f}" for name, cores in disturbed.items() if cores > _BUSY]
    if busy:
        console.print(f"Other work kept cores busy meanwhile (at most, of a visit): {', '.join(busy)}", style="yellow")


def _best(results: list[dict[str, Any]], name: str) -> float | None:
    values: list[float] = [result[name] for result in results if result[name] is not None]
    if len(values) < 2:
        return None
    return min(values) if name in _LESS_IS_BETTER else max(values)


def _cell(value: float | None, form: str, best: float | None) -> str:
    if value is None:
        return "-"
    text = form.format(value)
    return f"[bold green]{text}[/]" if value == best else text


def plot_report(report: dict[str, Any], path: Path) -> None:
    """One panel a figure, one bar an engine, ours in another colour. Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(20, 8), layout="constrained")
    for axis, (name, (heading, form)) in zip(axes.flat, _COLUMNS.items(), strict=True):
        rows = [result for result in reversed(report["results"]) if result[name] is not None]
        labels = [f"{result['engine']} {result['weights']}" for result in rows]
        colors = ["tab:orange" if result["engine"] == "kllm" else "tab:blue" for result in rows]
        bars = axis.barh(labels, [result[name] for result in rows], color=colors)
        axis.bar_label(bars, [form.format(result[name]) for result in rows], padding=3)
        hint = "less is better" if name in _LESS_IS_BETTER else "more is better"
        axis.set(title=f"{heading.replace(chr(10), ', ')} ({hint})")
        axis.margins(x=0.15)
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {report['measured_at']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
