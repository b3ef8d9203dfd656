"""Prometheus metrics of one server: the names that operators know from vLLM's dashboards, under `kllm:`.

Histograms and token counters are observed per request; what gateway and instances count themselves is read when
Prometheus asks. Durations are seconds of the caller's clock; this module reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kllm.telemetry.families import LABELS, PREFIX, Families
from kllm.telemetry.series import Count, Distribution
from kllm.telemetry.statistics import PROMPT_CLASSES, prompt_class
from kllm.telemetry.tier_metrics import TierLoad, tier_metrics

VLLM_PREFIX = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0)  # fmt: skip
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1) + REQUEST_BUCKETS
LENGTH_BUCKETS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from arrival to the first output token.", TTFT_BUCKETS),
    ("inter_token_latency_seconds", "Time between consecutive output tokens.", TOKEN_BUCKETS),
    ("request_time_per_output_token_seconds", "Mean time per output token after the first.", TOKEN_BUCKETS),
    ("e2e_request_latency_seconds", "Time from arrival to the last output token.", REQUEST_BUCKETS),
    ("request_queue_time_seconds", "Time waiting for a place in the running batch.", PHASE_BUCKETS),
    ("request_prefill_time_seconds", "Time computing the prompt.", PHASE_BUCKETS),
    ("request_decode_time_seconds", "Time from the first to the last output token.", PHASE_BUCKETS),
    ("request_prompt_tokens", "Tokens in the prompt.", LENGTH_BUCKETS),
    ("request_generation_tokens", "Tokens generated.", LENGTH_BUCKETS),
)


class Load(TierLoad, Protocol):
    """The part of kllm.messages.EngineLoad that is exported."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def kv_usage(self) -> float: ...

    @property
    def blocked(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def yields(self) -> int: ...

    @property
    def quota_tokens(self) -> int: ...

    @property
    def overtakes(self) -> int: ...

    @property
    def prefix_queries(self) -> int: ...

    @property
    def events_sent(self) -> int: ...

    @property
    def events_dropped(self) -> int: ...


class Source(Protocol):
    """Where current figures come from: the gateway. loads: of each instance. totals: counters summed over instances and
    their incarnations."""

    @property
    def loads(self) -> Sequence[Load]: ...

    @property
    def totals(self) -> Load: ...

    @property
    def restarts(self) -> int: ...

    @property
    def grade(self) -> int: ...

    @property
    def trips(self) -> int: ...


class RequestMetrics:
    """One request, from arrival to end. `now` is any monotonic clock in seconds."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, arrival: float) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrival = arrival
        self._first = self._last = arrival
        self._tokens = 0
        self._ended = False

    def tokens(self, count: int, now: float) -> None:
        """`count` more tokens reached the server; they share the time since the last ones."""
        if count == 0:
            return
        if self._tokens == 0:
            self._first = now
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
            self._metrics.count_prompt(self._prompt_tokens)
            between = count - 1
            gap = 0.0
        else:
            between = count
            gap = (now - self._last) / count
        if between:
            self._metrics.observe("inter_token_latency_seconds", gap, between)
        self._tokens += count
        self._last = now
        self._metrics.count_generated(count)

    def timings(self, queue_s: float, prefill_s: float) -> None:
        """Durations that the instance measured; they come with the first token."""
        self._metrics.observe("request_queue_time_seconds", queue_s)
        self._metrics.observe("request_prefill_time_seconds", prefill_s)
        self._metrics.observe_wait(self._prompt_tokens, queue_s + prefill_s)

    def end(self, reason: str, now: float) -> None:
        """Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        observe = self._metrics.observe
        self._metrics.count_finished(reason)
        observe("e2e_request_latency_seconds", now - self._arrival)
        observe("request_prompt_tokens", self._prompt_tokens)
        observe("request_generation_tokens", self._tokens)
        if self._tokens:
            observe("request_decode_time_seconds", self._last - self._first)
        if self._tokens > 1:
            observe("request_time_per_output_token_seconds", (self._last - self._first) / (self._tokens - 1))


class Metrics:
    """Every metric of one server, in a registry of its own.

    Gauges are of each instance, everything else is of the whole server. source: read at scrape time. cache_config:
    called then too, for the labels of cache_config_info. chunk_tokens: called when a first token comes: a prompt of at
    most so many tokens is of the class short, others are long; with 0 (not known) all are short. vllm_names: export
    everything under the prefix vllm: as well.
    """

    def __init__(
        self,
        model_name: str,
        source: Source,
        cache_config: Callable[[], Mapping[str, str]],
        chunk_tokens: Callable[[], int] = lambda: 0,
        vllm_names: bool = False,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        families = Families(model_name)
        self._labels = families.labels
        self._chunk_tokens = chunk_tokens
        self._vllm_names = vllm_names
        series = list(zip(LABELS, self._labels, strict=True))
        self._histograms = {
            name: Distribution(PREFIX + name, text, series, buckets) for name, text, buckets in _HISTOGRAMS
        }
        self._prompt = Count(PREFIX + "prompt_tokens", "Prompt tokens processed.", series)
        self._generated = Count(PREFIX + "generation_tokens", "Tokens generated.", series)
        for each in (*self._histograms.values(), self._prompt, self._generated):
            self.registry.register(each)
        wait = Histogram(
            PREFIX + "request_wait_seconds", "Time from the instance's receipt to the first token, by prompt class.",
            (*LABELS, "class"), buckets=PHASE_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._wait = {name: wait.labels(*self._labels, name) for name in PROMPT_CLASSES}
        finished = Counter(
            PREFIX + "request_success", "Requests by how they ended.", (*LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._finished = {reason: finished.labels(*self._labels, reason) for reason in FINISHED_REASONS}
        self._families = families
        self.registry.register(_SourceCollector(source, cache_config, families))

    def add(self, figures: Callable[[Families], Iterable[Metric]]) -> None:
        """More of them, called at scrape time."""
        self.registry.register(_Collector(figures, self._families))

    def request(self, prompt_tokens: int, arrival: float) -> RequestMetrics:
        return RequestMetrics(self, prompt_tokens, arrival)

    def observe(self, histogram: str, value: float, times: int = 1) -> None:
        self._histograms[histogram].observe(value, times)

    def observe_wait(self, prompt_tokens: int, seconds: float) -> None:
        self._wait[prompt_class(prompt_tokens, self._chunk_tokens())].observe(seconds)

    def count_prompt(self, tokens: int) -> None:
        self._prompt.value += tokens

    def count_generated(self, tokens: int) -> None:
        self._generated.value += tokens

    def count_finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        text = generate_latest(self.registry)
        if self._vllm_names:
            text += _renamed(text)
        return text


class _Collector(Collector):
    def __init__(self, figures: Callable[[Families], Iterable[Metric]], families: Families) -> None:
        self._figures = figures
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._figures(self._families)


class _SourceCollector(Collector):
    """What the gateway and the instances count themselves, read at scrape time."""

    def __init__(self, source: Source, cache_config: Callable[[], Mapping[str, str]], families: Families) -> None:
        self._source = source
        self._cache_config = cache_config
        self._families = families

    def collect(self) -> Iterator[Metric]:
        loads, totals, families = self._source.loads, self._source.totals, self._families
        yield families.gauge("num_requests_running", "Requests in the running batch.", [x.running for x in loads])
        yield families.gauge("num_requests_waiting", "Requests waiting for a place.", [x.waiting for x in loads])
        yield families.gauge(
            "num_requests_blocked",
            "Waiting requests that did not fit into the KV cache when they were tried last.",
            [x.blocked for x in loads],
        )
        yield families.gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", [x.kv_usage for x in loads])
        yield families.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.prefix_queries)
        yield families.counter(
            "prefix_cache_hits", "Tokens found in the prefix cache, in any tier.", totals.prefix_hits
        )
        yield families.counter("num_preemptions", "Preemptions.", totals.preemptions)
        yield families.counter("num_prefill_yields", "Times that a long prompt gave way to others.", totals.yields)
        yield families.counter(
            "prefill_quota_tokens", "Prompt tokens that long prompts computed before others.", totals.quota_tokens
        )
        yield families.counter(
            "num_overtakes", "Admissions past a request that did not fit into the KV cache.", totals.overtakes
        )
        yield families.counter(
            "cache_event_messages", "Messages about the cache that were published.", totals.events_sent
        )
        yield families.counter(
            "cache_event_batches_dropped", "Batches of cache events that were given up.", totals.events_dropped
        )
        yield from tier_metrics(families, loads, totals)
        yield families.counter("instance_restarts", "Times that an instance was started again.", self._source.restarts)
        yield families.gauge(
            "degradation_grade", "What is given up for want of capacity: 0, nothing, to 3.", [self._source.grade]
        )
        yield families.counter(
            "instance_ejections",
            "Times that an instance was avoided since too many requests failed there.",
            self._source.trips,
        )
        info = InfoMetricFamily(PREFIX + "cache_config", "How the KV cache is laid out.")
        info.add_metric((), dict(self._cache_config()) | dict(zip(LABELS, families.labels, strict=True)))
        yield info


def _renamed(text: bytes) -> bytes:
    """The same samples under vLLM's prefix. A metric's name starts its line or follows `# HELP ` or `# TYPE `."""
    old, new = PREFIX.encode(), VLLM_PREFIX.encode()
    lines = []
    for line in text.splitlines(keepends=True):
        for start in (b"# HELP ", b"# TYPE ", b""):
            if line.startswith(start + old):
                line = start + new + line[len(start) + len(old) :]
                break
        lines.append(line)
    return b"".join(lines)
