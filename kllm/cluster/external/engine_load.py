"""An external engine's EngineLoad: what its metrics say, and what we know of our own requests there."""

from __future__ import annotations

from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.engine_watch import EngineWatch
from kllm.cluster.external.in_flight import InFlight
from kllm.messages import EngineLoad


def engine_load(in_flight: InFlight, watch: EngineWatch, baseline: EngineMetrics | None, now: float) -> EngineLoad:
    """Role, numbers and progress are left to the caller. now: the loop's time.

    The engine may have other clients, so its own figures count where they are larger; they may also be a second old, so
    ours do otherwise. Where it does not count its steps, a chunk with output is one, and so is each time that it is
    found well."""
    running = in_flight.running
    decoding = [each for each in running if each.has_output]
    silent = [each for each in running if not each.has_output]
    latest, first = watch.metrics or EngineMetrics(), baseline or EngineMetrics()
    return EngineLoad(
        running=max(len(decoding), round(latest.running)),
        waiting=max(len(silent), round(latest.waiting)),
        kv_usage=min(1.0, max(0.0, latest.kv_usage)),
        preemptions=_since(first.preemptions, latest.preemptions),
        prefix_queries=_since(first.prefix_queries, latest.prefix_queries),
        prefix_hits=_since(first.prefix_hits, latest.prefix_hits),
        steps=in_flight.steps + watch.signs + _since(first.steps, latest.steps),
        lacking=sum(each.prompt_tokens for each in silent),
        decoding=len(decoding),
        context=sum(len(each.submit.request.prompt_token_ids) + each.reader.next_index for each in decoding),
        oldest_wait_s=max((now - each.since for each in silent), default=0.0),
    )


def _since(first: float, latest: float) -> int:
    return max(0, round(latest - first))
