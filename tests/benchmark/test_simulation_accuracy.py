"""benchmarks/simulation_accuracy: loads, calibration, comparison, and a short run of a tiny model."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from support.tiny_models import write_tiny_llama

from benchmarks.simulation_accuracy.__main__ import compare, keep_runs, kept_runs, report
from benchmarks.simulation_accuracy.calibration import Calibration, calibrate, fit_planning
from benchmarks.simulation_accuracy.loads import FULL, QUICK, Load
from benchmarks.simulation_accuracy.real import Latencies, Run, ServerFailed, record
from benchmarks.simulation_accuracy.report import Comparison, as_data, plot, print_table
from benchmarks.simulation_accuracy.simulated import saturation, simulate
from kllm.config import EngineConfig
from kllm.costs.fitted import FittedStepTime
from kllm.costs.noise import NoisyStepTime
from kllm.costs.step import StepWork, step_work
from kllm.engine.recording import RecordedStep
from kllm.simulation.executor import PlanningCost

TIMES = FittedStepTime(
    "known",
    {"decode": {"step": 5e-3, "rows": 1e-3}, "prefill": {"step": 5e-3, "rows": 1e-3, "new_tokens": 4e-4}},
    1e-4,
    {},
)
KNOWN = Calibration(TIMES, 0.0, PlanningCost(4e-4, 5e-5), 8e-3)
CONFIG = EngineConfig(model="simulated", num_kv_blocks=1000)
OPEN = Load("open", (16, 200), (4, 40), 3, share=0.5, seconds=20)
CLOSED = Load("closed", (16, 200), (4, 40), 4, clients=4, requests=24)


def run_of(load: Load, *, rate: float = 4.0, repeat: int = 0, steps: list[RecordedStep] | None = None) -> Run:
    """What a real engine with the known costs would leave behind."""
    empty = Run(load, repeat, rate, 1000, 2048, 1000, Latencies([], [], 0, 0.0), 0.0, steps or [])
    seen = simulate(empty, CONFIG, KNOWN, seed=0)
    inside = sum(seen.ttft_s) / len(seen.ttft_s) - KNOWN.path_s
    return msgspec.structs.replace(empty, seen=seen, inside_s=inside)


def recorded(count: int, rng: random.Random) -> list[RecordedStep]:
    """Steps of the known costs with 5 % noise."""
    source = NoisyStepTime(TIMES, rng, 0.05)
    steps = []
    for index in range(count):
        rows = [(rng.randrange(500), 1, True) for _ in range(rng.randrange(1, 12))]
        if index % 4 == 0:
            rows.append((0, rng.randrange(16, 300), True))
        work = step_work(rows)
        idle = None if index % 5 == 0 else 4e-4 + 5e-5 * work.rows
        steps.append(RecordedStep(work, source.draw(work), idle))
    return steps


# -- loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [*FULL, *QUICK], ids=lambda load: load.name)
def test_samples_are_those_that_the_load_describes(load: Load) -> None:
    samples = load.samples(1.5)
    assert all(load.inputs[0] <= sample.input_len <= load.inputs[1] for sample in samples)
    assert all(load.outputs[0] <= sample.output_len <= load.outputs[1] for sample in samples)
    if load.closed:
        assert len(samples) == load.requests
        assert sum(sample.after is None for sample in samples) == load.clients
        assert [sample.after for sample in samples[load.clients :]] == list(range(load.requests - load.clients))
    else:
        assert len(samples) == round(1.5 * load.seconds)
        assert samples[-1].arrival_s == pytest.approx(load.seconds, rel=0.8)


@pytest.mark.parametrize("load", FULL, ids=lambda load: load.name)
def test_only_fitted_loads_differ_from_round_to_round(load: Load) -> None:
    assert (load.samples(1.0, 0) == load.samples(1.0, 1)) != load.fitted


def test_what_is_predicted_is_not_what_was_fitted() -> None:
    fitted = [load for load in FULL if load.fitted]
    predicted = next(load for load in FULL if not load.fitted and not load.closed)
    assert len(fitted) == 2
    for load in fitted:
        assert (load.share, load.inputs, load.outputs, load.seed) != predicted
        assert load.share != predicted.share
        assert load.inputs != predicted.inputs
        assert load.seed != predicted.seed


# -- calibration -----------------------------------------------------------------------------------------------


def test_planning_is_a_constant_and_a_share_of_each_row() -> None:
    steps = recorded(200, random.Random(1))
    steps.append(RecordedStep(StepWork(rows=3, new_tokens=3), 0.01, 3.0))  # the process was stopped
    planning = fit_planning(steps)
    assert planning.step_s == pytest.approx(4e-4, rel=1e-6)
    assert planning.row_s == pytest.approx(5e-5, rel=1e-6)


def test_what_was_fitted_to_a_known_engine_predicts_it() -> None:
    """Steps, planning and path are found again, and a load that was not fitted comes out as it was."""
    runs = [run_of(replace(OPEN, seed=seed, fitted=True), steps=recorded(600, random.Random(seed))) for seed in (7, 8)]
    fitted = calibrate(runs, "known")
    assert fitted.path_s == pytest.approx(KNOWN.path_s, rel=1e-6)
    assert fitted.sigma == pytest.approx(0.05, rel=0.15)
    for load in (OPEN, CLOSED):
        (comparison,) = compare(
            [run_of(load, steps=recorded(300, random.Random(9)))], CONFIG, replace(fitted, sigma=0.0), seeds=1
        )
        errors = {figure.name: figure.error for figure in comparison.figures()}
        assert comparison.step_ratio == [pytest.approx(1.0, abs=0.02)]
        assert abs(errors["ttft mean"]) < 0.01
        assert abs(errors["tpot mean"]) < 0.01
        assert abs(errors["tokens/s"]) < 0.01


# -- simulation ------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_the_time_of_its_path_and_its_steps() -> None:
    seen = run_of(Load("one", (100, 100), (11, 11), 1, clients=1, requests=1)).seen
    planning = KNOWN.planning.step_s + KNOWN.planning.row_s
    assert seen.ttft_s == [pytest.approx(KNOWN.path_s + planning + 5e-3 + 1e-3 + 100 * 4e-4, rel=1e-3)]
    assert seen.tpot_s == [pytest.approx(planning + 6e-3, rel=1e-3)]
    assert seen.tokens == 11


def test_clients_of_a_closed_load_wait_for_the_path_too() -> None:
    load = Load("two turns", (50, 50), (5, 5), 1, clients=1, requests=2)
    one = run_of(replace(load, requests=1)).seen
    assert run_of(load).seen.duration_s == pytest.approx(2 * one.duration_s, rel=1e-3)


def test_seeds_change_the_noise_alone() -> None:
    run, noisy = run_of(OPEN), replace(KNOWN, sigma=0.2)
    first, again, other = (simulate(run, CONFIG, noisy, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.ttft_s != other.ttft_s
    assert first.tokens == other.tokens


def test_saturation_is_beyond_what_the_instance_can_keep_up_with() -> None:
    rate = saturation(OPEN, CONFIG, KNOWN, kv_tokens=16_000)
    calm, flooded = (run_of(OPEN, rate=rate * share).seen for share in (0.5, 2.0))
    assert max(calm.ttft_s) < 1.0
    assert max(flooded.ttft_s) > 3.0


# -- comparison ------------------------------------------------------------------------------------------------


def latencies(scale: float) -> Latencies:
    return Latencies([0.2 * scale, 0.4 * scale], [0.01 * scale, 0.02 * scale], round(1000 / scale), 10.0)


def test_errors_are_of_the_mean_of_the_repeats_and_judged_by_the_targets() -> None:
    real = [latencies(0.95), latencies(1.05)]
    simulated = [[latencies(1.07), latencies(1.09)]] * 2
    figures = {f.name: f for f in Comparison(OPEN, [1.0, 1.0], real, simulated, real, [1.0, 1.0]).figures()}
    assert figures["ttft mean"].error == pytest.approx(0.08)
    assert figures["ttft mean"].own_error == 0.0
    assert figures["ttft mean"].real_difference == pytest.approx(0.1)
    assert (figures["ttft mean"].lowest, figures["ttft mean"].highest) == pytest.approx((0.3 * 1.07, 0.3 * 1.09))
    assert [figures[name].verdict for name in ("ttft mean", "tpot mean", "ttft p95")] == ["aim", "must", ""]
    closed = {f.name: f for f in Comparison(CLOSED, [0.0], real[:1], simulated[:1], real[:1], [1.0]).figures()}
    assert closed["tokens/s"].verdict == "missed"
    assert closed["ttft mean"].verdict == ""
    fitted = Comparison(replace(OPEN, fitted=True), [1.0], real[:1], simulated[:1], real[:1], [1.0])
    assert not any(figure.verdict for figure in fitted.figures())


def test_table_and_data_say_the_same(tmp_path: Path) -> None:
    runs = [run_of(load, steps=recorded(50, random.Random(1))) for load in (OPEN, CLOSED)]
    comparisons = compare(runs, CONFIG, KNOWN, seeds=1)
    console = Console(record=True, width=140, file=(tmp_path / "table").open("w"))
    print_table(comparisons, console)
    text = console.export_text()
    data = report(comparisons, KNOWN, CONFIG, {"machine": {}})
    for load in data["loads"]:
        assert load["load"] in text
        assert f"{load['figures']['ttft mean']['simulated'] * 1e3:.1f}" in text
        assert load["figures"]["ttft mean"]["error"] == 0
    assert data["loads"][1]["figures"]["tokens/s"]["verdict"] == "aim"
    assert data["calibration"]["path_ms"] == 8.0


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cdf.png"
    plot(compare([run_of(CLOSED, steps=recorded(50, random.Random(1)))], CONFIG, KNOWN, seeds=1), "known", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_kept_runs_are_the_same_when_they_are_read_again(tmp_path: Path) -> None:
    runs = [run_of(load, steps=recorded(5, random.Random(1))) for load in (OPEN, CLOSED)]
    keep_runs(tmp_path / "new", runs)
    assert kept_runs(tmp_path / "new", [OPEN, CLOSED], 1) == runs


# -- the real engine -------------------------------------------------------------------------------------------


def test_a_server_is_recorded_and_simulated(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_tiny_llama(tmp_path / "model")), num_kv_blocks=64, threads=1)
    load = Load("short", (8, 40), (4, 12), 1, clients=2, requests=6)
    ended: list[int] = []
    run = asyncio.run(record(load, 0.0, 0, config, lambda record: ended.append(record.index)))
    samples = load.samples(0.0)
    assert sorted(ended) == list(range(6))
    assert run.num_blocks == 64
    assert run.seen.tokens == sum(sample.output_len for sample in samples)
    assert sum(step.work.new_tokens for step in run.steps) == sum(s.input_len + s.output_len - 1 for s in samples)
    assert sum(step.work.sampled for step in run.steps) == run.seen.tokens
    assert 0 < run.inside_s < sum(run.seen.ttft_s) / 6
    assert any(step.idle_s is not None for step in run.steps)
    (comparison,) = compare([run], config, calibrate([run], "here"), seeds=1)
    assert as_data(comparison)["figures"]["tokens/s"]["simulated"] > 0
    assert simulate(run, config, KNOWN, 0).tokens == run.seen.tokens


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"broken")
    config = EngineConfig(model=str(model), num_kv_blocks=64)
    with pytest.raises(ServerFailed, match="did not start"):
        asyncio.run(record(Load("any", (8, 8), (2, 2), 1, clients=1, requests=1), 0.0, 0, config, lambda record: None))
