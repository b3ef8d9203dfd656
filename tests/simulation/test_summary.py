"""The figures of a simulated run against plain definitions, and its table."""

from __future__ import annotations

import io
import json
import statistics

import numpy as np
import pytest
from rich.console import Console
from support.fleet_results import add_tiers, make_result

from kllm.simulation.results import FleetResult, InstanceSample, RequestOutcome
from kllm.simulation.summary import instance_figures, summarise
from kllm.simulation.table import print_summary
from kllm.telemetry.statistics import Slo

DISTRIBUTION = {"mean", "p50", "p90", "p95", "p99"}
PROMISED = {"decision_hash", "requests", "completed", "ttft_s", "tpot_s", "goodput_rps", "hit_rate"}
PROMISED |= {"simulated_s", "wall_s"}


def make_empty(**changes: object) -> FleetResult:
    values = {"outcomes": [], "samples": [], "decision_hash": "0", "simulated_s": 0.0, "wall_s": 0.0, "steps": 0}
    return FleetResult(**(values | {"gpus": 1} | changes))


def printed(summary: dict) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, console)
    return console.file.getvalue()


def test_the_promised_keys_are_there_and_it_is_json():
    summary = summarise(make_result(), Slo(2000, 50))
    assert set(summary) >= PROMISED
    assert set(summary["ttft_s"]) == set(summary["tpot_s"]) == DISTRIBUTION
    assert set(summary["hit_rate"]) == {"l1", "l2", "l3"}
    assert summary["hit_rate"]["l2"] == summary["hit_rate"]["l3"] == 0
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_hits_are_shared_out_among_the_tiers():
    without, summary = summarise(make_result(), Slo()), summarise(add_tiers(make_result()), Slo())
    assert without["tiers"] is None
    l1, l2, l3 = summary["hit_rate"].values()
    assert l1 + l2 + l3 == pytest.approx(without["hit_rate"]["l1"])
    assert (l1, l3) == pytest.approx((l2 / 2, l2 / 2), rel=1e-5)
    assert summary["tiers"]["loaded"] == 4321
    assert summary["tiers"]["wasted"] == 17
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    table = printed(summary)
    for words in (
        "L2 to L1",
        "4,321 blocks",
        "800 of 1,000",
        "500, 10.0 ms on average, 3 too late",
        "17 brought in vain",
    ):
        assert words in table
    assert "L2" not in printed(without)


def test_latencies_are_those_of_completed_requests():
    result = make_result()
    summary = summarise(result, Slo())
    done = [outcome for outcome in result.outcomes if outcome.ending == "completed"]
    assert summary["requests"] == 500
    assert summary["completed"] == len(done) < 500
    assert summary["ttft_s"]["mean"] == pytest.approx(statistics.fmean(one.ttft_s for one in done), rel=1e-5)
    for percent in (50, 90, 95, 99):
        expected = float(np.percentile([one.tpot_s for one in done if one.tpot_s is not None], percent))
        assert summary["tpot_s"][f"p{percent}"] == pytest.approx(expected, rel=1e-5)
    assert sum(summary["endings"].values()) == 500
    assert summary["retried"] == sum(one.attempts > 1 for one in result.outcomes)


def test_reasons_of_requests_that_did_not_complete():
    result = make_result()
    summary = summarise(result, Slo())
    refused = sum(one.ending == "refused" for one in result.outcomes)
    assert summary["reasons"] == [{"ending": "refused", "detail": "the queue is full", "requests": refused}]
    assert f"{refused} × refused: the queue is full" in printed(summary)


def test_goodput_counts_requests_within_both_limits():
    result = make_result()
    summary = summarise(result, Slo(ttft_ms=300, tpot_ms=30))
    within = sum(
        one.ending == "completed" and one.ttft_s <= 0.3 and (one.tpot_s is None or one.tpot_s <= 0.03)
        for one in result.outcomes
    )
    seconds = max(one.end_s for one in result.outcomes) - min(one.arrival_s for one in result.outcomes)
    assert 0 < within < summary["completed"]
    assert summary["goodput_rps"] == pytest.approx(within / seconds, rel=1e-5)
    assert summary["slo"] == {"ttft_ms": 300, "tpot_ms": 30, "share": pytest.approx(within / 500, rel=1e-5)}


def test_tokens_hit_rate_and_cost():
    outcomes = [
        RequestOutcome(0, 1.0, 600, 100, 300, 0.5, 0.01, 3.0, "completed"),
        RequestOutcome(1, 2.0, 400, 300, 100, 0.5, 0.01, 6.0, "completed"),
        RequestOutcome(2, 2.0, 9999, 50, 0, None, None, 2.5, "error"),
    ]
    summary = summarise(make_empty(outcomes=outcomes, simulated_s=36.0, gpus=8, cost_per_gpu_hour=2.0), Slo())
    assert summary["hit_rate"]["l1"] == pytest.approx(0.4)
    assert summary["duration_s"] == 5.0
    assert summary["output_tokens_per_s"] == pytest.approx(80)
    assert summary["total_tokens_per_s"] == pytest.approx(280)
    assert summary["output_tokens_per_s_per_gpu"] == pytest.approx(10)
    dollars = 8 * 2.0 * 36 / 3600
    assert summary["cost"]["total"] == pytest.approx(dollars)
    assert summary["cost"]["per_million_output_tokens"] == pytest.approx(dollars / 400 * 1e6)
    assert summary["cost"]["per_million_tokens"] == pytest.approx(dollars / 1400 * 1e6, rel=1e-5)


def test_samples_count_for_the_time_they_stand_for():
    samples = [
        InstanceSample(1.0, 0, True, 4, 0, 0.2, 1.0, 10.0, 100.0),
        InstanceSample(4.0, 0, True, 8, 2, 0.6, 0.5, 20.0, 300.0),
        InstanceSample(5.0, 0, False, 0, 0, 0.0, 0.0, 0.0, 0.0),
    ]
    (figures,) = instance_figures(samples)
    assert figures["up"] == pytest.approx(0.8)
    assert figures["busy"] == pytest.approx((1 * 1.0 + 3 * 0.5) / 5)
    assert figures["running"] == pytest.approx((1 * 4 + 3 * 8) / 4)
    assert figures["kv_usage"] == pytest.approx((1 * 0.2 + 3 * 0.6) / 4)
    assert figures["step_rows"] == pytest.approx((1.0 * 10 + 1.5 * 20) / 2.5)
    assert (figures["running_peak"], figures["waiting_peak"], figures["kv_usage_peak"]) == (8, 2, 0.6)


def test_the_order_of_samples_does_not_matter():
    result = make_result()
    assert instance_figures(result.samples[::-1]) == instance_figures(result.samples)


def test_waits_of_short_and_long_prompts():
    result = make_result()
    classes = summarise(result, Slo())["prompt_classes"]
    done = [outcome for outcome in result.outcomes if outcome.ending == "completed"]
    short = [one.ttft_s for one in done if one.prompt_tokens <= result.chunk_tokens]
    long = [one.ttft_s for one in done if one.prompt_tokens > result.chunk_tokens]
    assert (classes["short"]["requests"], classes["long"]["requests"]) == (len(short), len(long))
    assert classes["short"]["ttft_s"]["mean"] == pytest.approx(statistics.fmean(short), rel=1e-5)
    assert classes["long"]["ttft_s"]["p95"] == pytest.approx(float(np.percentile(long, 95)), rel=1e-5)
    assert f"Time to first token, {len(long)} long prompts" in printed(summarise(result, Slo()))


def test_without_long_prompts_there_is_one_class():
    result = make_result()
    result.chunk_tokens = 10**6
    summary = summarise(result, Slo())
    assert list(summary["prompt_classes"]) == ["short"]
    assert "short prompts" not in printed(summary)


def test_a_run_without_requests_has_figures_too():
    summary = summarise(make_empty(), Slo(1, 1))
    assert summary["ttft_s"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    assert summary["goodput_rps"] == 0
    assert summary["cost"] is None
    assert summary["prompt_classes"] == {}
    assert "0 of 0" in printed(summary)
    assert "Fairness" not in printed(summary)


def test_the_table_says_what_happened():
    text = printed(summarise(make_result(), Slo(2000, 50)))
    for words in (
        "Time to first token",
        "TTFT ≤ 2 s and TPOT ≤ 50 ms",
        "80.0 % of saturation, 31.0 % at the trace's own times",
        "100 crash 1",
        "long prompts gave way 1,234 times (one of them 56 times) and computed 78,000 tokens before others",
        "requests without room in the KV cache were passed 9 times",
    ):
        assert words in text
    assert "c0ffee" in text


def test_markup_in_texts_is_shown_as_it_is():
    result = make_result()
    result.notes = ["[red]not a colour[/red]", "[/]"]
    result.decision_hash = "[bold]x"
    text = printed(summarise(result, Slo()))
    assert "[red]not a colour[/red]" in text
    assert "[bold]x" in text
