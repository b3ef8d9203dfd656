"""`kllm cache`: look into a KV store on disk, check it, clear it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kllm.cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kllm.cache.stores.inspection import Findings, StoreSummary

_MOST_ROWS = 20  # segments, and bad pages, that are listed
_TIMES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))

app = typer.Typer(
    help="Look into a KV store on disk (--l3 PATH), check it, clear it.", no_args_is_help=True, rich_markup_mode=None
)
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command("inspect")
def inspect_store(path: StorePath, as_json: AsJson = False) -> None:
    """Pages, bytes, ages and models of the store at PATH. Instances may be using it."""
    from kllm.cache.stores.inspection import inspect

    summary = inspect(path)
    if as_json:
        _print_json(summary)
        return
    _print_summary(summary)


@app.command("verify")
def verify_store(
    path: StorePath,
    repair: Annotated[bool, typer.Option("--repair", help="Forget the pages that are bad.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every page of the store at PATH and check it; exit status 1 if one is bad. Instances may be using it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kllm.cache.stores.inspection import page_count, verify

    console = Console(stderr=True)
    columns = (TextColumn("Checking pages"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=page_count(path))
        findings = verify(path, repair=repair, on_pages=lambda pages: progress.advance(task, pages))
    if as_json:
        _print_json(findings)
    else:
        _print_findings(findings)
    if findings.bad:
        raise CommandError(
            f"{path}: {len(findings.bad):,} of {findings.pages:,} pages were bad"
            + (" and are forgotten now" if repair else "; --repair forgets them")
        )


@app.command("clear")
def clear_store(path: StorePath, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Forget all pages of the store at PATH. Instances may be using it: they compute what they do not find."""
    from kllm.cache.stores.inspection import clear, page_count

    pages = page_count(path)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("clear asks before it does anything; without a terminal give --yes")
        typer.confirm(f"Forget {pages:,} pages in {path}?", abort=True)
    print(f"{clear(path):,} pages forgotten")


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())


def _print_summary(summary: StoreSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{summary.path} (format {summary.format})", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{summary.pages:,} pages, {_size(summary.bytes)}; {len(summary.segments):,} segments, "
        f"{_size(summary.file_bytes)}; index {_size(summary.index_bytes)}",
        highlight=False,
    )
    if summary.oldest_use_s is not None and summary.newest_use_s is not None:
        console.print(f"last uses: {_age(summary.newest_use_s)} to {_age(summary.oldest_use_s)} ago", highlight=False)
    if summary.fingerprints:
        table = Table("model and layout", "groups", "pages", "size")
        for kind in summary.fingerprints:
            groups = ", ".join(str(group) for group in kind.groups)
            table.add_row(kind.fingerprint or "(none)", groups, f"{kind.pages:,}", _size(kind.bytes))
        console.print(table)
    if summary.segments:
        _print_segments(summary, console)


def _print_segments(summary: StoreSummary, console: Console) -> None:
    from rich.table import Table

    now = time.time()
    table = Table("segment", "pages", "file", "written", "last use", "")
    by_use = sorted(summary.segments, key=lambda segment: segment.used)
    for segment in by_use[:_MOST_ROWS]:
        state = "active" if segment.active else "missing" if segment.file_bytes == 0 and segment.pages else ""
        ages = (_age(max(0.0, now - when)) for when in (segment.created, segment.used))
        table.add_row(segment.name, f"{segment.pages:,}", _size(segment.file_bytes), *ages, state)
    console.print(table)
    if len(by_use) > _MOST_ROWS:
        console.print(f"and {len(by_use) - _MOST_ROWS:,} used later (--json lists all)", highlight=False)


def _print_findings(findings: Findings) -> None:
    print(f"{findings.pages:,} pages checked, {_size(findings.bytes)}: {len(findings.bad):,} bad")
    for page in findings.bad[:_MOST_ROWS]:
        print(f"  segment {page.segment} at {page.offset:,}: {page.reason} (key {page.key})")
    if len(findings.bad) > _MOST_ROWS:
        print(f"  and {len(findings.bad) - _MOST_ROWS:,} more (--json lists all)")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(seconds: float) -> str:
    for unit_s, name in _TIMES:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return "0 s"
