"""The figures of benchmarks/gateway_overhead.py as tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("ttft_p99_ms", "p99"),
    ("token_p50_ms", "token p50, ms"),
    ("token_p99_ms", "p99"),
    ("loop_p50_ms", "loop p50, ms"),
    ("loop_p99_ms", "p99"),
    ("cpu_us_per_request", "CPU/request, µs"),
    ("server_cores", "server, cores"),
    ("client_cores", "client, cores"),
    ("client_late_p99_ms", "client late p99, ms"),
    ("completed_rps", "completed/s"),
)


RESULTS = ("added_ttft_p50_ms", "added_ttft_p99_ms", "added_us_per_token", "cpu_us_per_request", "saturation_rps")


def print_figures(figures: dict[str, Any], console: Console) -> None:
    table = Table()
    for heading in ("load", "req/s", *(heading for _, heading in COLUMNS)):
        table.add_column(heading, justify="right")
    named = {"16 tokens": "short_outputs", "80 tokens": "long_outputs", "token ids": "token_ids", "chat": "chat"}
    for name, key in (*named.items(), ("bare server", "bare")):
        _row(table, name, figures[key])
    for load in figures["rates"]:
        _row(table, "text", load)
    console.print(table)
    for name in (
        "added_ttft_p50_ms",
        "added_ttft_p99_ms",
        "added_us_per_token",
        "cpu_us_per_request",
        "saturation_rps",
    ):
        console.print(f"{name} {figures[name]}")
    if "profile" in figures:
        print_profile(figures["profile"], console)


def _row(table: Table, name: str, load: dict[str, Any]) -> None:
    figures = ["-" if load.get(key) is None else f"{load[key]:.4g}" for key, _ in COLUMNS]
    table.add_row(name, f"{load['rate']:g}", *figures)


def print_profile(profile: dict[str, Any], console: Console) -> None:
    """By file, then by line; shares of all samples."""
    files: Counter[str] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    for file, name, _, count in profile["own"]:
        files[file] += count
        functions[file, name] += count
    total = profile["samples"]
    for title, rows in (
        ("by file", [(file, count) for file, count in files.most_common(25)]),
        ("by function", [(f"{file} {name}", count) for (file, name), count in functions.most_common(40)]),
        ("within", [(f"{file} {name}", count) for file, name, count in profile["within"][:60]]),
    ):
        table = Table(title=title)
        table.add_column("where")
        table.add_column("share", justify="right")
        for where, count in rows:
            table.add_row(where, f"{count / total:.1%}")
        console.print(table)
