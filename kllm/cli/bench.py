"""`kllm bench serve | latency | throughput`: measure a running server, or the engine alone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.benchmark.config import LatencyConfig, LoadConfig, ThroughputConfig
from kllm.cli.errors import CommandError
from kllm.cli.options import Flags, ModelArgument, build, config_flags
from kllm.config import EngineConfig

if TYPE_CHECKING:
    from kllm.llm import LLM

app = typer.Typer(help="Benchmarks.", no_args_is_help=True, rich_markup_mode=None)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


@app.command()
@config_flags(LoadConfig)
def serve(
    flags: Flags,
    as_json: JsonFlag = False,
    output: Annotated[Path | None, typer.Option(help="File for the report and every request, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot (.png, .svg, .pdf); needs the extra plot.")] = None,
) -> None:
    """Send requests to a running server; report latencies, throughput and goodput."""
    config = build(LoadConfig, flags)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'kllm[plot]'")
    from kllm.benchmark import report as reports

    report, records = _run_load(config)
    if output is not None:
        reports.write_json(output, report, records)
    if plot is not None:
        reports.plot_load(plot, records)
    if as_json:
        print(json.dumps(report))
    else:
        from rich.console import Console

        reports.print_load_report(report, Console())


@app.command()
@config_flags(LatencyConfig, EngineConfig)
def latency(model: ModelArgument, flags: Flags, as_json: JsonFlag = False) -> None:
    """Time to first token and decode rate of one request at a time, without a server."""
    config = build(LatencyConfig, flags)
    engine = build(EngineConfig, flags, model=model)
    from kllm.benchmark.offline import measure_latency
    from kllm.workload.sample import TokenSource

    source = TokenSource(config.seed, config.vocab_size)
    with _loaded(engine) as llm:
        figures = measure_latency(llm, config.input_len, config.output_len, config.iterations, source, config.warm_up)
    _print_figures(engine, figures, as_json)


@app.command()
@config_flags(ThroughputConfig, EngineConfig)
def throughput(model: ModelArgument, flags: Flags, as_json: JsonFlag = False) -> None:
    """Tokens per second of many requests at once, without a server."""
    config = build(ThroughputConfig, flags)
    engine = build(EngineConfig, flags, model=model)
    from kllm.benchmark.offline import measure_throughput
    from kllm.workload.generators import shared_prefix_samples
    from kllm.workload.sample import WARM_UP, Sample, TokenSource

    lengths = (config.prefix_len, config.input_len, config.output_len)
    samples = shared_prefix_samples(config.num_prompts, 1, *lengths)
    warm_up = [Sample((((WARM_UP, index), min(config.input_len, 64)),), 4) for index in range(2)]
    with _loaded(engine) as llm:
        figures = measure_throughput(llm, samples, TokenSource(config.seed, config.vocab_size), warm_up)
    _print_figures(engine, figures, as_json)


def _run_load(config: LoadConfig) -> tuple[dict[str, Any], list[Any]]:
    """Run with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kllm.benchmark.serving import make_samples, run_benchmark

    samples = make_samples(config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Warming up", total=None)
        return asyncio.run(
            run_benchmark(
                config,
                samples,
                on_start=lambda total: progress.update(task, description="Requests", total=total),
                on_end=lambda record: progress.advance(task),
            )
        )


@contextmanager
def _loaded(engine: EngineConfig) -> Iterator[LLM]:
    from kllm.llm import LLM

    with closing(LLM(**engine.model_dump(exclude_unset=True))) as llm:
        yield llm


def _print_figures(engine: EngineConfig, figures: dict[str, Any], as_json: bool) -> None:
    figures = {"model": engine.model, "dtype": engine.dtype, **figures}
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console

    from kllm.benchmark.report import print_rows

    print_rows(
        {name: f"{value:,}" if isinstance(value, int | float) else str(value) for name, value in figures.items()},
        Console(),
    )
