"""The driver's command line: see the package's docstring."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.peers.engines import FIGURES, choose, choose_figures
from benchmarks.peers.environments import Environments, SetupError, Tell
from benchmarks.peers.models import Models
from benchmarks.peers.report import plot_report, print_report
from benchmarks.peers.results import Measured, build_report, cores, cpu_info, merge, read_report, write_report
from benchmarks.peers.visits import Setting, own_python, run_visit
from benchmarks.peers.workload import FULL, QUICK, make_prompts
from kllm.hub.cache import models_folder
from kllm.hub.resolver import resolve
from kllm.hub.source import ModelSource, ModelSourceError
from kllm.tokenization.tokenizer import load_tokenizer

RESULTS = Path(__file__).parents[1] / "results"
console = Console(stderr=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="kLLM beside other engines.")
    parser.add_argument("--model", default="smollm2", help="alias or path of a GGUF file")
    parser.add_argument("--engines", default="all", help="comma-separated names or patterns; also all, peers")
    parser.add_argument("--figures", default="all", help=f"comma-separated: {', '.join(FIGURES)}")
    parser.add_argument("--repeat", type=int, default=3, help="visits of each engine")
    parser.add_argument("--quick", action="store_true", help="one visit, few short prompts, nothing kept: does it run?")
    parser.add_argument("--install-only", action="store_true", help="make environments and convert the model, no more")
    parser.add_argument("--json", type=Path, help=f"where results are kept and merged ({RESULTS.name}/peers.json)")
    parser.add_argument("--plot", type=Path, help=f"PNG file ({RESULTS.name}/peers.png)")
    parser.add_argument("--fresh", action="store_true", help="replace the kept results instead of merging")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds a visit may take")
    parser.add_argument("--cache", type=Path, default=models_folder().parent / "peers", help="environments, models")
    parser.add_argument("--pip-options", default="", help="for every pip install, such as an extra index")
    arguments = parser.parse_args()
    try:
        arguments.chosen, arguments.taken = choose(arguments.engines), choose_figures(arguments.figures)
    except ValueError as error:
        parser.error(str(error))
    if arguments.repeat < 1 or arguments.time_limit <= 0:
        parser.error("--repeat and --time-limit must be positive")
    if not arguments.quick:
        arguments.json = arguments.json or RESULTS / "peers.json"
        arguments.plot = arguments.plot or RESULTS / "peers.png"
    return arguments


def prepare(measured: list[Measured], environments: Environments, models: Models, tell: Tell) -> dict[str, Path]:
    """Install and convert; name of each engine that is ready to its model. The others get their reason."""
    ready: dict[str, Path] = {}
    failed: dict[str, SetupError] = {}
    for entry in measured:
        engine = entry.engine
        try:
            if engine.vendor not in ("", cpu_info().get("vendor_id")):
                raise SetupError(f"only for processors of {engine.vendor}")
            if engine.environment is not None:
                _install_once(engine.environment, environments, failed, tell)
            ready[engine.name] = models.get(engine.format, tell)
        except SetupError as error:
            entry.failure = str(error)
    return ready


def _install_once(name: str, environments: Environments, failed: dict[str, SetupError], tell: Tell) -> None:
    """An environment that several engines share and that failed for one has failed for the others."""
    if name not in failed:
        try:
            environments.install(name, tell)
        except SetupError as error:
            failed[name] = SetupError(f"cannot be installed: {error}")
    if name in failed:
        raise failed[name]


def measure(
    measured: list[Measured], ready: dict[str, Path], environments: Environments, setting: Setting, repeat: int
) -> None:
    """All visits, interleaved. An engine that failed is not visited again: it would fail again, at full cost."""
    active = [entry for entry in measured if entry.engine.name in ready]
    for entry in active:
        left_out = entry.engine.leaves_out
        entry.left_out = {name: left_out[name] for name in setting.figures if name in left_out}
    with _progress() as progress:
        task = progress.add_task("", total=repeat * len(active))
        for round_ in range(repeat):
            turn = round_ % max(1, len(active))
            for entry in active[turn:] + active[:turn]:
                if entry.failure is None:
                    _visit(entry, ready[entry.engine.name], environments, setting, progress, task)
                progress.advance(task)


def _visit(
    entry: Measured, model: Path, environments: Environments, setting: Setting, progress: Progress, task: Any
) -> None:
    engine = entry.engine
    python = own_python() if engine.environment is None else environments.python(engine.environment)
    variables = environments.variables(engine.environment, setting.cores)
    progress.update(task, description=f"{engine.name}: starting")

    def tell(text: str) -> None:
        progress.update(task, description=f"{engine.name}: {text}")

    visit = run_visit(engine, python, model, variables, setting, tell)
    if visit.samples:
        entry.visits.append(visit)
    if visit.error is not None:
        entry.failure = visit.error
        console.print(f"{engine.name}: {visit.error}", style="red", markup=False)


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)


def source_of(model: str) -> ModelSource:
    source = resolve(model)
    if source.kind != "gguf":
        raise ModelSourceError(f"{model}: a GGUF file is needed, every engine's format is made of it")
    return source


def keep(report: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Merge with the results kept earlier, write them, plot them. Returns what the table shows."""
    if arguments.json is not None:
        try:
            old = None if arguments.fresh else read_report(arguments.json)
            report = merge(old, report) if old is not None else report
        except ValueError as error:
            aside = arguments.json.with_suffix(".new.json")
            console.print(f"{arguments.json} is left as it is, these results go to {aside}: {error}", style="yellow")
            arguments.json = aside
        write_report(arguments.json, report)
    if arguments.plot is not None:
        try:
            plot_report(report, arguments.plot)
        except ImportError:
            console.print("No plot: matplotlib is not installed (pip install 'kllm[plot]')", style="yellow")
    return report


def run(arguments: argparse.Namespace) -> int:
    measured = [Measured(engine) for engine in arguments.chosen]
    workload = QUICK if arguments.quick else FULL
    source = source_of(arguments.model)
    prompts = make_prompts(load_tokenizer(source).encode, workload)
    environments = Environments(arguments.cache.expanduser().resolve(), shlex.split(arguments.pip_options))
    logs = environments.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    prompts.write(logs / "prompts.json")
    with console.status("") as status:
        ready = prepare(measured, environments, Models(source, environments), lambda text: status.update(text))
    if arguments.install_only:
        for entry in measured:
            console.print(f"{entry.engine.name}: {entry.failure or 'ready'}", markup=False)
        return 0 if ready else 1
    repeat = 1 if arguments.quick else arguments.repeat
    setting = Setting(workload, logs / "prompts.json", arguments.taken, cores(), arguments.time_limit, logs)
    measure(measured, ready, environments, setting, repeat)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report = keep(build_report(measured, arguments.taken, workload, prompts.digest(), now), arguments)
    print_report(report, Console(width=None if sys.stdout.isatty() else 160))
    return 0 if any(entry.visits for entry in measured) else 1


def main() -> None:
    arguments = parse()
    try:
        sys.exit(run(arguments))
    except (ModelSourceError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
