"""Benchmarks in parts: each part is measured by itself, and its figures are kept until it is measured again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers.results import machine
from benchmarks.simulation_accuracy.real import ServerFailed

RESULTS = Path(__file__).parent / "results"
Parts = Mapping[str, Callable[[Progress], dict[str, Any]]]
Figures = dict[str, Any]


def main(
    about: str | None,
    parts: Parts,
    file_name: str,
    summary: Callable[[Figures], Figures],
    show: Callable[[Figures, Console], None],
) -> None:
    """about: the command's help. file_name: of what is kept, in benchmarks/results. summary: what --json prints.
    show: prints tables."""
    arguments = _parse(about, parts, RESULTS / file_name)
    console = Console(stderr=True)
    try:
        kept = measure(parts, arguments.parts, arguments.results, console)
    except (ServerFailed, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    show(kept, console)
    if arguments.json:
        print(json.dumps(summary(kept)))


def _parse(about: str | None, parts: Parts, results: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(parts), help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=results, help="file that keeps the figures")
    arguments = parser.parse_args()
    arguments.parts = [part for part in arguments.parts.split(",") if part]
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return arguments


def measure(parts: Parts, chosen: list[str], path: Path, console: Console) -> Figures:
    """The figures that are kept, those of the chosen parts measured now. Raises ServerFailed, OSError, ValueError."""
    kept: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for part in chosen:
            facts = {"machine": machine(), "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
            kept[part] = parts[part](progress) | facts
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept
