"""A verification for people (a table, a plot) and for programs (a JSON file)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kllm.verification.gate import Outcome, Verification, as_json
from kllm.verification.judgement import Check
from kllm.verification.variants import VARIANTS

_COLUMNS = ("ppl", "change", "limit", "agree", "equal", "needles", "JSON")
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_verification(result: Verification, console: Console) -> None:
    """The table, then one line for each limit that was missed and each variant that did not run."""
    title = f"{result.model}: {result.scored_tokens:,} tokens of {result.text}, {result.window} at a time"
    table = Table(
        caption="ppl: perplexity · agree: positions with plain's most likely token · equal: tokens until a greedy "
        "continuation leaves plain's · needles, JSON: facts found in long text, answers that keep to their schema",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,  # fits 80 columns
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for outcome in result.outcomes:
        table.add_row(*_row(outcome))
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    for outcome in result.outcomes:
        for check in outcome.checks:
            if not check.passed:
                console.print(f"{outcome.name}: {_sentence(check)}", style=_STYLES["failed"], highlight=False)
        if outcome.status == "skipped":
            console.print(f"{outcome.name} did not run: {outcome.reason}", style=_STYLES["skipped"], highlight=False)


def summary(outcome: Outcome) -> str:
    """One variant as one line of text: its figures, its time and what was missed."""
    figures = outcome.figures
    if figures is None:
        return f"{outcome.name}: {outcome.status}, {outcome.reason}"
    words = [f"perplexity {figures.perplexity:.6g}"]
    if outcome.name in VARIANTS:
        limit = VARIANTS[outcome.name].limits.perplexity
        words[0] += f" ({figures.perplexity_change:+.3%}, at most {limit:.1%})"
        words.append(f"agreement {figures.agreement:.1%}")
    for name, share in (("needles", figures.needles), ("JSON", figures.structured)):
        if share is not None:
            words.append(f"{name} {share:.0%}")
    words.append(f"{figures.seconds:.0f} s")
    missed = "; ".join(_sentence(check) for check in outcome.checks if not check.passed)
    return f"{outcome.name}: {outcome.status}, {', '.join(words)}" + (f"; {missed}" if missed else "")


def write_json(path: Path, result: Verification) -> None:
    """Replaces the file in one go, so that readers of a run in progress always find a whole report. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(result)), indent=1) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def plot(path: Path, result: Verification) -> None:
    """Change of perplexity of every variant that ran, beside its limit. Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [outcome for outcome in result.variants if outcome.figures is not None]
    names = [outcome.name for outcome in ran]
    changes = [100 * outcome.figures.perplexity_change for outcome in ran if outcome.figures is not None]
    limits = [100 * VARIANTS[name].limits.perplexity for name in names]
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(names)), layout="constrained")
    colors = ["tab:blue" if outcome.status == "passed" else "tab:red" for outcome in ran]
    axis.barh(names, changes, color=colors)
    for sign in (-1, 1):
        axis.plot([sign * limit for limit in limits], names, "|", color="black", markersize=14)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(xlabel="change of perplexity in %, with its limits", title=f"{result.model} against its plain path")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _row(outcome: Outcome) -> list[str]:
    state = f"[{_STYLES[outcome.status]}]{outcome.status}[/]"
    figures = outcome.figures
    if figures is None:
        return [outcome.name, *("" for _ in _COLUMNS), state]
    change = limit = ""
    if outcome.name in VARIANTS:
        change, limit = f"{figures.perplexity_change:+.3%}", f"{VARIANTS[outcome.name].limits.perplexity:.1%}"
    return [
        outcome.name,
        f"{figures.perplexity:.6g}",
        change,
        limit,
        f"{figures.agreement:.1%}",
        f"{figures.equal_tokens:.1f}",
        _percent(figures.needles),
        _percent(figures.structured),
        state,
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _sentence(check: Check) -> str:
    most = "at most" if check.relation == "<=" else "at least"
    return f"{check.name} is {check.value:.3g}, {most} {check.limit:.3g} is allowed"
