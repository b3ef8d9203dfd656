"""benchmarks/tiers.py: its load, what it makes of runs, and the parts that need no real engine, in small."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks import tiers
from benchmarks.kv_tiers import bubbles, report
from benchmarks.kv_tiers.sessions import Sessions
from kllm.workload.reuse import infinite_cache_hits


def test_turns_of_a_session_grow_in_order() -> None:
    load = Sessions(sessions=5, turns=3, systems=2, system=100, question=50, reply=10)
    samples = load.samples(2.0)
    assert len(samples) == 15
    assert [sample.arrival_s for sample in samples] == sorted(sample.arrival_s for sample in samples)
    by_session: dict[int, list[int]] = {}
    for sample in samples:
        by_session.setdefault(sample.parts[1][0][1], []).append(sample.input_len)
    assert all(lengths == [150, 210, 270] for lengths in by_session.values())
    assert load.working_set == 2 * 100 + 5 * 170
    hits, total = infinite_cache_hits(load.samples(math.inf), 10)
    assert total == sum(sample.input_len for sample in samples)
    # every prompt but the first of its system prompt hits it, later turns hit the one before as a whole
    assert hits == 3 * 100 + 5 * (150 + 210)


def test_a_prompt_through_all_tiers_in_small() -> None:
    with Progress(disable=True) as progress:
        figures = bubbles.between_steps(progress, 40_000)
    assert figures["all_tiers_fetching"]["blocks_loaded"] == 40_000 // 16 - 1
    assert figures["all_tiers"]["prefill_s"] >= 40_000 / bubbles.CHUNK * bubbles.STEP_S
    assert figures["l1"]["p99_ms"] >= figures["l1"]["p50_ms"] > 0


@pytest.mark.parametrize("measured", [{}, {"virtual": {}}])
def test_what_is_not_measured_is_none(measured: dict[str, object]) -> None:
    summary = tiers.summary(measured)
    assert summary["bubble_p99_ms"] is None
    assert summary["hit_rate"] is None
    report.print_figures(measured, Console(file=io.StringIO()))
