"""`kllm simulate`: a fleet in virtual time, from flags or a file to a table, JSON and a page."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.config_file import build_with_file
from kllm.cli.errors import CommandError
from kllm.cli.options import Flags, build, config_flags
from kllm.simulation.config import SimulationConfig

if TYPE_CHECKING:
    from kllm.simulation.results import FleetResult

OnProgress = Callable[[float, int, int], None]  # simulated seconds, requests ended, requests in all

LINE_EVERY_S = 10.0  # of wall time, where there is no terminal to draw on


@config_flags(SimulationConfig)
def simulate(
    flags: Flags,
    config: Annotated[
        Path | None, typer.Option(help="File with these options by name, as TOML or YAML; flags win over it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    page: Annotated[Path | None, typer.Option(help="File for the report with plots, one HTML page.")] = None,
    decisions: Annotated[Path | None, typer.Option(help="File for the decision log, one line each.")] = None,
) -> None:
    """Replay a trace against a simulated fleet: the production gateway, scheduler and cache in virtual time.

    Reports latencies, goodput, hit rates, utilisation and cost. The same options and seed give the same decisions."""
    given = build(SimulationConfig, flags) if config is None else build_with_file(SimulationConfig, config, flags)
    for path in (page, decisions):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: the folder does not exist")
    result = _run(given, decisions)
    _report(result, given, as_json, page)


def _run(settings: SimulationConfig, decisions: Path | None) -> FleetResult:
    from kllm.simulation.run import simulate as run_simulation

    log = nullcontext(None) if decisions is None else decisions.open("w", encoding="utf-8")
    with log as file, _quiet_logs(), _progress() as on_progress:
        return run_simulation(settings, on_progress=on_progress, decisions=file)


def _report(result: FleetResult, settings: SimulationConfig, as_json: bool, page: Path | None) -> None:
    from kllm.simulation.summary import summarise
    from kllm.telemetry.statistics import Slo

    summary = summarise(result, Slo(settings.slo_ttft_ms, settings.slo_tpot_ms))
    if page is not None:
        from kllm.simulation.page import render_page

        page.write_text(render_page(result, summary), encoding="utf-8")
    if as_json:
        print(json.dumps(summary))
        return
    from rich.console import Console

    from kllm.simulation.table import print_summary

    print_summary(summary, Console())


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """An instance that dies is news to whoever runs a fleet. Here it was asked for and is in the report: only what
    should never happen is shown."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno >= logging.CRITICAL or record.exc_info is not None)
    logger = logging.getLogger("kllm")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """On standard error: a bar on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty():
        yield ProgressLines(time.monotonic, lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn("requests, {task.fields[simulated]} simulated,"), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Starting", total=None, simulated=simulated_time(0.0))

        def on_progress(simulated_s: float, done: int, total: int) -> None:
            simulated = simulated_time(simulated_s)
            progress.update(task, description="Simulating", completed=done, total=total, simulated=simulated)

        yield on_progress


class ProgressLines:
    """on_progress that writes a line when `LINE_EVERY_S` seconds of `clock` have passed since the one before."""

    def __init__(self, clock: Callable[[], float], write: Callable[[str], None]) -> None:
        self._clock = clock
        self._write = write
        self._next = clock() + LINE_EVERY_S

    def __call__(self, simulated_s: float, done: int, total: int) -> None:
        now = self._clock()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._write(f"simulated {simulated_time(simulated_s)}, {done:,} of {total:,} requests ended")


def simulated_time(seconds: float) -> str:
    """'1:02:03' of hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
