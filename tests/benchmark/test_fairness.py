"""benchmarks/fairness.py: its load, what it makes of runs, and its small parts for real."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks import fairness, parts
from benchmarks.long_prompts import blocked, planning, report, sweep, virtual
from benchmarks.long_prompts.mixed import FIGURES, LONG_FROM, MixedLoad, Seen, compare
from benchmarks.long_prompts.simulated import saturation, seen, simulate, this_machine
from kllm.config import EngineConfig


def quiet() -> Progress:
    return Progress(console=Console(file=io.StringIO()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mixed_load(seed: int) -> None:
    samples = MixedLoad(rate=2.0, seconds=100.0, seed=seed).samples()
    long = [sample.input_len for sample in samples if sample.input_len >= LONG_FROM]
    short = [sample.input_len for sample in samples if sample.input_len < LONG_FROM]
    assert len(samples) == 200
    assert len(long) == 6, "3 %, whatever the seed"
    assert 64 <= min(short) <= max(short) <= 512
    assert max(long) + 64 <= 8192, "prompt and output fit into the model"
    arrivals = [sample.arrival_s for sample in samples]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(100.0)
    assert samples == MixedLoad(rate=2.0, seconds=100.0, seed=seed).samples()
    assert samples != MixedLoad(rate=2.0, seconds=100.0, seed=seed + 1).samples()


def test_changes_are_medians_over_the_pairs() -> None:
    before = [Seen([(100, 1.0), (5000, 3.0)], 1000, 10.0) for _ in range(3)]
    after = [Seen([(100, 0.5 * factor), (5000, 1.5 * factor)], 1000, 10.0 / factor) for factor in (1, 2, 1.6)]
    changes = compare(before, after)
    assert changes["ttft_change"] == dict.fromkeys(FIGURES, pytest.approx(-0.2))
    assert changes["throughput_change"] == pytest.approx(0.6)
    assert changes["of_each_pair"]["mean"] == pytest.approx([-0.5, 0.0, -0.2])
    assert changes["after"]["ttft_s_short"]["p50"] == pytest.approx(0.8)
    assert changes["after"]["ttft_s_long"]["p50"] == pytest.approx(2.4)


def test_the_load_on_a_simulated_instance() -> None:
    """Fair prefill lets the short prompts of a burst pass the long ones, and loses no work."""
    rate = 0.5 * saturation(MixedLoad(1.0, 300.0, 0).samples(), EngineConfig(model="smollm2"), this_machine())
    samples = MixedLoad(rate, 60.0, 3).samples()
    runs = {}
    for policy in ("fcfs", "fair"):
        config = EngineConfig(model="smollm2", scheduling_policy=policy)
        runs[policy] = seen(simulate(samples, config, this_machine(), seed=3))
    assert len(runs["fair"].ttft) == len(samples)
    assert runs["fair"].tokens == runs["fcfs"].tokens
    assert runs["fair"].ttft_s(long=False)["mean"] < runs["fcfs"].ttft_s(long=False)["mean"]
    assert runs["fair"].tokens_per_s > 0.95 * runs["fcfs"].tokens_per_s


@pytest.mark.parametrize("policy", planning.POLICIES)
@pytest.mark.parametrize("situation", planning.SITUATIONS)
def test_the_crowd_stays_as_large_as_it_is_said_to_be(policy: str, situation: str) -> None:
    crowd = planning.Crowd(policy, situation, seed=0)
    for _ in range(4):
        assert crowd.measured_step() > 0
    load = crowd.scheduler.load()
    assert load.running + load.waiting == planning.RUNNING + planning.WAITING
    assert load.running >= planning.RUNNING
    assert (load.blocked > 0) == (situation == "no room")
    crowd.scheduler.check()


def test_parts_are_kept_and_shown(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(planning, "ROUNDS", 1)
    monkeypatch.setattr(planning, "STEPS", 2)
    monkeypatch.setattr(blocked, "OVERTAKES", (0, 16))
    monkeypatch.setattr(blocked, "SEEDS", (0,))
    monkeypatch.setattr(blocked, "SECONDS", 40.0)
    monkeypatch.setattr(sweep, "SHARES", (0.5,))
    monkeypatch.setattr(sweep, "SEEDS", (0,))
    monkeypatch.setattr(sweep, "SECONDS", 20.0)
    monkeypatch.setattr(sweep, "OTHERS", {"default": {}})
    monkeypatch.setattr(virtual, "TRACE_SECONDS", 20.0)
    monkeypatch.setattr(virtual, "WAVES", ((5.0, (600_000,)),))
    results, console = tmp_path / "fairness.json", Console(file=io.StringIO(), width=160)
    parts.measure(fairness.PARTS, ["plan", "f2"], results, console)
    kept = parts.measure(fairness.PARTS, ["sweep", "virtual"], results, console)
    assert set(kept) == {"plan", "f2", "sweep", "virtual"} == set(json.loads(results.read_text()))
    figures = fairness.summary(kept)
    assert figures["plan_ms"] > 0
    assert figures["ttft_change"] is None, "not measured"
    assert kept["virtual"]["long_completion_ratio"] > 0
    shown = Console(file=io.StringIO(), width=160)
    report.print_figures(kept, shown)
    text = shown.file.getvalue()
    for words in ("fair, no room", "max_overtakes", "default", "without_long", "completion of the long prompts"):
        assert words in text
