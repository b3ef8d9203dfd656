"""`kllm verify MODEL`: the quality gate."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kllm.cli.errors import CommandError
from kllm.cli.options import Flags, ModelArgument, build, config_flags
from kllm.verification.config import VerifyConfig

if TYPE_CHECKING:
    from kllm.verification.gate import Verification


@config_flags(VerifyConfig)
def verify(
    model: ModelArgument,
    flags: Flags,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the report, as JSON; written anew after each variant.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot (.png, .svg, .pdf); needs the extra plot.")] = None,
) -> None:
    """Compare MODEL's features and number formats with its plain path; exit status 1 if one is beyond its limits.

    Perplexity and greedy agreement on English text, facts found in long text, validity of structured output."""
    config = build(VerifyConfig, flags)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'kllm[plot]'")
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: the folder does not exist")
    result = _run(model, config, json_file)
    from rich.console import Console

    from kllm.verification import report

    report.print_verification(result, Console())
    if plot is not None:
        report.plot(plot, result)
    if not result.passed:
        raise CommandError("beyond the limits: " + _failures(result))


def _run(model: str, config: VerifyConfig, json_file: Path | None) -> Verification:
    """On standard error a line for each variant that ends; on a terminal also a progress bar, with a step for each part
    of each variant."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kllm.verification import report
    from kllm.verification.gate import chosen_variants, verify
    from kllm.verification.measurement import PARTS

    names = ["plain", *(variant.name for variant in chosen_variants(config))]
    steps = ("load", *PARTS)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("Reading the text", total=len(names) * len(steps))

        def on_part(variant: str, part: str) -> None:
            done = names.index(variant) * len(steps) + steps.index(part)
            progress.update(task, description=f"{variant}: {part}", completed=done)

        def on_outcome(so_far: Verification) -> None:
            line = report.summary(so_far.outcomes[-1])
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            if json_file is not None:
                report.write_json(json_file, so_far)

        result = verify(model, config, on_part, on_outcome)
        progress.update(task, description="Done", completed=len(names) * len(steps))
        return result


def _failures(result: Verification) -> str:
    failed = [outcome for outcome in result.outcomes if not outcome.acceptable]
    return ", ".join(f"{outcome.name} ({outcome.reason or outcome.status})" for outcome in failed)
