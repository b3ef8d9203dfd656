"""Reports for people (tables, plots) and for programs (JSON files)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kllm.benchmark.client import RequestRecord

_LATENCIES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Between chunks",
    "e2e_ms": "Whole request",
}


def print_load_report(report: dict[str, Any], console: Console) -> None:
    """Latencies, throughput, goodput and errors of one `kllm bench serve`."""
    table = Table(title="Latency in milliseconds", title_justify="left")
    columns = ("mean", "p50", "p90", "p95", "p99")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for key, title in _LATENCIES.items():
        if figures := report[key]:
            table.add_row(title, *(f"{figures[column]:,.1f}" for column in columns))
    console.print(table)

    rows = {
        "Completed": f"{report['completed']} of {report['requests']} in {report['duration_s']:.2f} s",
        "Requests/s": f"{report['requests_per_s']:.2f}",
        "Output tokens/s": f"{report['output_tokens_per_s']:,.1f} ({report['output_tokens']:,} tokens)",
        "Total tokens/s": f"{report['total_tokens_per_s']:,.1f}",
        "Prompt tokens": f"{report['prompt_tokens']:,}, {report['cached_tokens']:,} of them from the prefix cache",
    }
    if goodput := report.get("goodput"):
        rows["Goodput"] = f"{goodput['share']:.1%} of requests within the SLO, {goodput['requests_per_s']:.2f} a second"
    if delay := report["send_delay_ms"]:
        rows["Sent late by"] = f"{delay['p50']:.1f} ms (p50), {delay['p99']:.1f} ms (p99)"
    if report["scaling"]:
        rows["Scaled"] = "; ".join(report["scaling"])
    if report["too_long"]:
        rows["Left out"] = f"{report['too_long']} requests longer than the model allows"
    if report["errors"]:
        rows["Errors"] = ", ".join(f"{count} × {kind}" for kind, count in sorted(report["errors"].items()))
    print_rows(rows, console)


def print_rows(rows: dict[str, str], console: Console) -> None:
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def write_json(path: Path, report: dict[str, Any], records: Sequence[RequestRecord]) -> None:
    """The report and every request, chunk times included. Raises OSError."""
    path.write_text(json.dumps({**report, "records": [asdict(record) for record in records]}), encoding="utf-8")


def plot_load(path: Path, records: Sequence[RequestRecord]) -> None:
    """Distributions of the latencies, and when each request waited and streamed. Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [record for record in records if record.ok and record.chunk_s]
    series = {
        "Time to first token": [record.ttft_s * 1e3 for record in good if record.ttft_s is not None],
        "Time per output token": [record.tpot_s * 1e3 for record in good if record.tpot_s is not None],
        "Whole request": [record.e2e_s * 1e3 for record in good],
    }
    figure, axes = pyplot.subplots(1, len(series) + 1, figsize=(18, 4.5), layout="constrained")
    for axis, (title, values) in zip(axes, series.items(), strict=False):
        if values:
            axis.ecdf(values)
        axis.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1))
        axis.grid(alpha=0.3)
    timeline = axes[-1]
    rows = [record.index for record in good]
    firsts = [record.chunk_s[0] for record in good]
    timeline.hlines(rows, [record.sent_s for record in good], firsts, colors="tab:orange", label="to first token")
    timeline.hlines(rows, firsts, [record.end_s for record in good], colors="tab:blue", label="streaming")
    timeline.plot(
        [record.sent_s for record in records if not record.ok],
        [record.index for record in records if not record.ok],
        "rx",
        label="failed",
    )
    timeline.set(title="Requests over time", xlabel="s", ylabel="request")
    timeline.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
