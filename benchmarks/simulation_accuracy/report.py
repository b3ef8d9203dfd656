"""Comparing, and showing it: table, plot, and the plain data of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulation_accuracy.loads import Load
from benchmarks.simulation_accuracy.real import Latencies
from kllm.telemetry.statistics import distribution

PUBLISHED = {"ttft mean": 0.176, "tpot mean": 0.071}  # the best errors that simulators of others have published


@dataclass(frozen=True)
class Target:
    """Largest errors: of what must be, and of what is aimed at."""

    must: float
    aim: float


OPEN_TARGETS = {"ttft mean": Target(0.15, 0.10), "tpot mean": Target(0.10, 0.05)}
CLOSED_TARGETS = {"tokens/s": Target(0.05, 0.05)}


@dataclass(frozen=True)
class Figure:
    """One figure of one load: of each real repeat, and simulated (mean over the seeds, and the extremes).

    own_steps: simulated with everything fitted to the very runs it is compared with. Its error is the simulator's, that
    of `simulated` has the change of the machine between the runs in it, too."""

    name: str
    real: list[float]
    simulated: float
    lowest: float
    highest: float
    own_steps: float
    target: Target | None

    @property
    def real_mean(self) -> float:
        return sum(self.real) / len(self.real)

    @property
    def real_difference(self) -> float:
        """Between the repeats, as a share of their mean."""
        return (max(self.real) - min(self.real)) / self.real_mean

    @property
    def error(self) -> float:
        return self.simulated / self.real_mean - 1

    @property
    def own_error(self) -> float:
        return self.own_steps / self.real_mean - 1

    @property
    def verdict(self) -> str:
        """ "", or against its target: aim, must or missed."""
        if self.target is None:
            return ""
        off = abs(self.error)
        return "aim" if off <= self.target.aim else "must" if off <= self.target.must else "missed"


@dataclass(frozen=True)
class Comparison:
    """A load, its real repeats, and the simulated runs of each repeat (one a seed).

    own_steps: of each repeat, simulated with what is fitted to itself. step_ratio: of each repeat, the sum of its
    recorded step times over what the model fitted to A and B says of the same steps."""

    load: Load
    rates: list[float]
    real: list[Latencies]
    simulated: list[list[Latencies]]
    own_steps: list[Latencies]
    step_ratio: list[float]

    def figures(self) -> list[Figure]:
        targets = {} if self.load.fitted else CLOSED_TARGETS if self.load.closed else OPEN_TARGETS
        real = [figures_of(run) for run in self.real]
        seeds = [_mean([figures_of(run) for run in runs]) for runs in zip(*self.simulated, strict=True)]
        simulated, own = _mean(seeds), _mean([figures_of(run) for run in self.own_steps])
        return [
            Figure(
                name,
                [run[name] for run in real],
                simulated[name],
                min(seed[name] for seed in seeds),
                max(seed[name] for seed in seeds),
                own[name],
                targets.get(name),
            )
            for name in simulated
        ]


def figures_of(run: Latencies) -> dict[str, float]:
    """Seconds, and tokens a second."""
    figures = {}
    for kind, values in (("ttft", run.ttft_s), ("tpot", run.tpot_s)):
        spread = distribution(values)
        assert spread is not None, "every load has requests of several tokens"
        figures |= {f"{kind} {name}": spread[name] for name in ("mean", "p50", "p95")}
    return figures | {"tokens/s": run.tokens_per_s}


def _mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(run[name] for run in figures) / len(figures) for name in figures[0]}


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Of a comparison as JSON: seconds, tokens a second, shares."""
    load = comparison.load
    return {
        "load": load.name,
        "fitted": load.fitted,
        "input_tokens": load.inputs,
        "output_tokens": load.outputs,
        "requests": [len(run.ttft_s) for run in comparison.real],
        "clients": load.clients or None,
        "rate_rps": None if load.closed else [round(rate, 4) for rate in comparison.rates],
        "share_of_saturation": load.share or None,
        "step_ratio": [round(ratio, 4) for ratio in comparison.step_ratio],
        "figures": {
            figure.name: {
                "real": [round(value, 6) for value in figure.real],
                "real_difference": round(figure.real_difference, 4),
                "simulated": round(figure.simulated, 6),
                "simulated_range": [round(figure.lowest, 6), round(figure.highest, 6)],
                "error": round(figure.error, 4),
                "error_with_own_steps": round(figure.own_error, 4),
                **({"verdict": figure.verdict} if figure.target else {}),
            }
            for figure in comparison.figures()
        },
    }


def print_table(comparisons: Sequence[Comparison], console: Console) -> None:
    repeats = max(len(comparison.real) for comparison in comparisons)
    table = Table(title="Simulated against real (ms; tokens/s)", title_justify="left")
    for column in (
        "load",
        "figure",
        *(f"real {i + 1}" for i in range(repeats)),
        "differ",
        "simulated",
        "error",
        "own steps",
    ):
        table.add_column(column, justify="left" if column in ("load", "figure") else "right")
    table.add_column("target")
    for comparison in comparisons:
        figures = comparison.figures()
        for figure in figures:
            first, last = figure is figures[0], figure is figures[-1]
            table.add_row(*_cells(comparison, figure, first), end_section=last)
    console.print(table)
    console.print("own steps: the error of simulations that are fitted to the very runs they are compared with")
    for comparison in comparisons:
        ratios = ", ".join(f"{ratio:.3f}" for ratio in comparison.step_ratio)
        console.print(f"{comparison.load.name}: recorded step times over those of the model: {ratios}")


def _cells(comparison: Comparison, figure: Figure, first: bool) -> list[str]:
    load = comparison.load
    name = f"{load.name}{' (fitted)' if load.fitted else ''}" if first else ""
    unit = 1.0 if figure.name == "tokens/s" else 1e3
    target = ""
    if figure.target is not None:
        color = "red" if figure.verdict == "missed" else "green"
        target = f"[{color}]{figure.verdict}[/] ({figure.target.must:.0%}, aim {figure.target.aim:.0%})"
    return [
        name,
        figure.name,
        *(f"{value * unit:.1f}" for value in figure.real),
        f"{figure.real_difference:.1%}",
        f"{figure.simulated * unit:.1f}",
        f"{figure.error:+.1%}",
        f"{figure.own_error:+.1%}",
        target,
    ]


def plot(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Cumulative distributions of TTFT and TPOT of the loads that were predicted. Raises ImportError, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    predicted = [comparison for comparison in comparisons if not comparison.load.fitted]
    figure, axes = pyplot.subplots(
        len(predicted), 2, figsize=(12, 4 * len(predicted)), layout="constrained", squeeze=False
    )
    for row, comparison in zip(axes, predicted, strict=True):
        for axis, kind in zip(row, ("ttft_s", "tpot_s"), strict=True):
            simulated = [value for runs in comparison.simulated for run in runs for value in getattr(run, kind)]
            for number, run in enumerate(comparison.real, 1):
                _draw(axis, getattr(run, kind), label=f"real {number}", color="tab:blue", alpha=1.2 / (number + 0.2))
            _draw(axis, simulated, label="simulated", color="tab:orange")
            axis.set(
                title=f"load {comparison.load.name}", xlabel=f"{kind[:4].upper()} (ms)", ylabel="share of requests"
            )
            axis.set_xlim(left=0)
            axis.legend()
            axis.grid(alpha=0.3)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw(axis: Any, values: Sequence[float], **style: Any) -> None:
    ordered = sorted(values)
    times = [value * 1e3 for value in (ordered[0], *ordered)]
    axis.step(times, [i / len(ordered) for i in range(len(times))], where="post", **style)
