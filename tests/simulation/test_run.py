"""Whole simulations from a config: what is reported, what is refused, and that one seed gives one history."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from statistics import mean
from typing import Any

import pytest

from kllm.simulation.config import SimulationConfig
from kllm.simulation.load import LoadError
from kllm.simulation.results import FleetResult
from kllm.simulation.run import SimulationError, simulate

SMALL: dict[str, Any] = {"trace": "mooncake-conversation", "limit_seconds": 20.0, "instances": 2, "start_s": 1.0}


def run_small(**changes: Any) -> FleetResult:
    return simulate(SimulationConfig.model_validate(SMALL | changes))


def test_a_trace_on_a_small_fleet() -> None:
    result = run_small()
    assert {outcome.ending for outcome in result.outcomes} == {"completed"}
    assert result.gpus == 16
    assert result.settings["layout"] == "tp8"
    assert 0 < (result.trace_load or 0) < 2
    assert result.load == result.trace_load
    assert result.steps > 0
    assert any("KV capacity" in note for note in result.notes)


def test_load_scales_arrivals_to_a_share_of_saturation() -> None:
    native, doubled = run_small(), run_small(load=None)
    assert native.decision_hash == doubled.decision_hash
    target = 2 * (native.load or 0)
    scaled = run_small(load=target)
    assert scaled.load == target
    last = max(outcome.arrival_s for outcome in native.outcomes)
    assert max(outcome.arrival_s for outcome in scaled.outcomes) == pytest.approx(last / 2, rel=1e-6)
    assert any("times between requests are 1/2 of the trace's" in note for note in scaled.notes)


@pytest.mark.parametrize("trace", ["random", "shared-prefix", "long-short", "sessions"])
def test_made_up_loads(trace: str) -> None:
    result = run_small(trace=trace, num_prompts=30, request_rate=10.0, model="llama-70b", load=0.5)
    assert [outcome.ending for outcome in result.outcomes] == ["completed"] * 30
    reused = sum(outcome.cached_tokens for outcome in result.outcomes)
    assert (reused > 0) == (trace in ("shared-prefix", "sessions"))


def test_long_prompts_give_way_where_the_policy_says_so() -> None:
    load = {"trace": "long-short", "num_prompts": 60, "request_rate": 10.0, "load": 0.9, "input_len": 1000}
    load |= {"long_input_len": 60_000, "max_num_batched_tokens": 2048, "instances": 1}
    fair, first_come = (run_small(**load, scheduling_policy=policy) for policy in ("fair", "fcfs"))
    assert fair.yields >= fair.most_yields > 0
    assert fair.chunk_tokens == 2048
    assert (first_come.yields, first_come.most_yields, first_come.quota_tokens) == (0, 0, 0)
    waits = [mean(o.ttft_s or 0 for o in run.outcomes if o.prompt_tokens <= 2048) for run in (fair, first_come)]
    assert waits[0] < waits[1] / 2


def test_sessions_without_a_common_clock_start_as_a_poisson_process() -> None:
    result = run_small(trace="weka-agentic", num_prompts=40, limit_seconds=None, load=0.3)
    assert result.load == 0.3
    assert any("conversations start as a Poisson process" in note for note in result.notes)


def test_predictions_are_not_perfect_by_construction() -> None:
    """The truth has its own coefficients: without noise and deviation, steps would take other times."""
    assert run_small().decision_hash != run_small(noise=0.0, deviation=0.0).decision_hash


def test_the_decision_log_tells_what_the_hash_is_of() -> None:
    lines = io.StringIO()
    result = simulate(SimulationConfig.model_validate(SMALL | {"num_prompts": 5}), decisions=lines)
    kinds = [line.split('"')[1] for line in lines.getvalue().splitlines()]
    assert {"launch", "route", "plan", "end"} <= set(kinds)
    assert kinds.count("end") == 5
    again = simulate(SimulationConfig.model_validate(SMALL | {"num_prompts": 5}))
    assert again.decision_hash == result.decision_hash, "writing the log changes nothing"


def test_one_seed_one_history_with_faults_under_any_hash_seed() -> None:
    flags = "--trace mooncake-conversation --limit-seconds 15 --instances 3 --faults random:5:6 --seed 7 --json"
    reports = []
    for hash_seed in ("1", "99"):
        done = subprocess.run(
            [sys.executable, "-m", "kllm.cli", "simulate", *flags.split()],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        report = json.loads(done.stdout)
        del report["wall_s"]
        reports.append({name: value for name, value in report.items() if not name.startswith("wall")})
    assert len(reports[0]["decision_hash"]) == 32
    assert reports[0] == reports[1]


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill and decode go together"):
        run_small(prefill=1)
    with pytest.raises(LoadError, match="no rate"):
        run_small(trace="random", num_prompts=3, load=0.5)
    with pytest.raises(SimulationError, match="no request fits"):
        run_small(max_model_len=10)
    with pytest.raises(SimulationError, match="is of 8 GPUs, not 4"):
        run_small(layout="dp8ep8", gpus_per_instance=4)
