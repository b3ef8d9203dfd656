"""SLO Load: how much of what the service level objectives allow is used, one number a side. At 1 they are just met.

    Load_P = max(predicted TTFT of a typical new request, windowed p90 of measured TTFT) / SLO of the TTFT
    Load_D = max(predicted TPOT, windowed p90 of measured TPOT) / SLO of the TPOT

The prediction is there before anybody is late; the measurement does not depend on any model. A request that waits
counts with its age. Of each instance, for routing guards: an instance has the sides of its role. Of each pool, for
scaling: the prediction is that of the instance where the next request would do best (a mean hides a hot instance, and
the worst one would scale for bad routing), the measurement is over all requests.

Pure: `now` is an argument, from any clock that does not go back. Nothing is done for a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from statistics import fmean

import msgspec

from kllm.cluster.latency_window import Window, p90, p90_with_ages
from kllm.cluster.slo_prediction import Demand, InstanceReport, kv_guard, predict_tpot, predict_ttft
from kllm.cluster.slo_snapshot import InstanceSlo, PoolSlo, Side, SloLimits, SloSnapshot

WINDOW_S = 30.0
RATE_S = 10.0  # of which the rate of prompt tokens is taken
TYPICAL = 64  # requests from which the typical one is made
REPORT_S = 1.1  # what was submitted longer ago is in the instance's report
EARLY_TOKENS = 8  # a request that has fewer is judged as if it had so many: its first gaps mean little


class _Request:
    """lacking: tokens that its instance has to compute first, as far as was known when it was submitted there."""

    __slots__ = ("arrived", "first_at", "instance", "lacking", "outputs", "prompt", "submitted")

    def __init__(self, now: float, prompt: int, outputs: Sized) -> None:
        self.arrived = self.submitted = now
        self.prompt = prompt
        self.outputs = outputs
        self.instance: int | None = None
        self.lacking = 0
        self.first_at: float | None = None


class _Open:
    """Requests that have not ended, of one instance or all. ages: of those that wait. gaps: seconds per token of those
    that decode."""

    __slots__ = ("ages", "gaps", "waiting")

    def __init__(self) -> None:
        self.waiting: list[_Request] = []
        self.ages: list[float] = []
        self.gaps: list[float] = []


class _Measured:
    """What was measured lately at one instance, or at all."""

    __slots__ = ("tokens", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft, self.tpot = Window(WINDOW_S), Window(WINDOW_S)
        self.tokens = Window(RATE_S)  # uncached prompt tokens of requests that have their first token


class SloLoad:
    """A gateway owns one and says what happens to its requests; unknown ids are ignored."""

    def __init__(self, limits: SloLimits | None = None) -> None:
        self.limits = limits or SloLimits()
        self._waiting: dict[str, _Request] = {}
        self._decoding: dict[str, _Request] = {}
        self._all = _Measured()
        self._of: dict[int, _Measured] = {}
        self._typical: deque[tuple[int, int]] = deque(maxlen=TYPICAL)  # (uncached, whole) prompt tokens
        self._ended: deque[tuple[float, int]] = deque(maxlen=TYPICAL)  # seconds from the first token on, and tokens

    # --- what happens ---

    def arrived(self, request_id: str, now: float, prompt: int, outputs: Sized) -> None:
        """A request was accepted. outputs: its tokens so far, whose number is looked at when it is asked for."""
        self._waiting[request_id] = _Request(now, prompt, outputs)

    def submitted(self, request_id: str, now: float, instance: int, lacking: int) -> None:
        """It was given to an instance, which has so many tokens to compute before the next one."""
        request = self._waiting.get(request_id) or self._decoding.get(request_id)
        if request is not None:
            request.instance, request.lacking, request.submitted = instance, lacking, now

    def has_output(self, request_id: str, now: float, cached: int) -> None:
        """Its first token has come. cached: prompt tokens that did not have to be computed. Later calls do nothing."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return
        request.first_at = now
        self._decoding[request_id] = request
        uncached = max(1, request.prompt - cached)
        self._typical.append((uncached, request.prompt))
        for measured in self._measured(request.instance):
            measured.ttft.add(now, now - request.arrived)
            measured.tokens.add(now, uncached)

    def ended(self, request_id: str, now: float) -> None:
        """However it ended. One that had no token counts if it was late already."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            if now - request.arrived > self.limits.ttft_s:
                for measured in self._measured(request.instance):
                    measured.ttft.add(now, now - request.arrived)
            return
        request = self._decoding.pop(request_id, None)
        if request is None or request.first_at is None:
            return
        seconds, tokens = now - request.first_at, len(request.outputs) - 1
        for measured in self._measured(request.instance):
            if tokens > 0:
                measured.tpot.add(now, seconds / tokens)
        self._ended.append((seconds, tokens))

    def left(self, instance: int) -> None:
        """An instance is gone, and what was measured there with it; its requests wait for another one."""
        self._of.pop(instance, None)
        for request in (*self._waiting.values(), *self._decoding.values()):
            if request.instance == instance:
                request.instance = None

    def _measured(self, instance: int | None) -> Iterator[_Measured]:
        yield self._all
        if instance is not None:
            measured = self._of.get(instance)
            if measured is None:
                measured = self._of[instance] = _Measured()
            yield measured

    # --- what it comes to ---

    def snapshot(self, now: float, reports: Sequence[InstanceReport]) -> SloSnapshot:
        """reports: of the instances that may get requests now."""
        typical = self._typical_request()
        everything, by_instance = self._open(now, reports)
        decoders = sum(report.role == "decode" for report in reports)
        instances = []
        for report in reports:
            there = by_instance[report.index]
            joining = float(len(there.waiting))
            if report.role == "decode":  # they get what others prefill now
                joining = len(everything.waiting) / decoders
            measured = self._of.get(report.index) or _Measured()
            demand = self._demand(typical, report, now, measured, there, joining)
            instances.append(self._instance(report, now, measured, there, demand))
        return SloSnapshot(
            limits=self.limits,
            window_s=WINDOW_S,
            waiting=len(self._waiting),
            decoding=len(self._decoding),
            typical_uncached=typical.own,
            typical_prompt=typical.prompt,
            pools={
                "prefill": _pool(self._ttft(self._all, everything, now), [(i.index, i.prefill) for i in instances]),
                "decode": _pool(self._tpot(self._all, everything, now), [(i.index, i.decode) for i in instances]),
            },
            instances=instances,
        )

    def _open(self, now: float, reports: Sequence[InstanceReport]) -> tuple[_Open, dict[int, _Open]]:
        """Requests that have not ended: all, and by instance."""
        everything, by_instance = _Open(), {report.index: _Open() for report in reports}
        nowhere = _Open()
        for request in self._waiting.values():
            there = nowhere if request.instance is None else by_instance.get(request.instance, nowhere)
            for each in (everything, there):
                each.waiting.append(request)
                each.ages.append(now - request.arrived)
        for request in self._decoding.values():
            there = nowhere if request.instance is None else by_instance.get(request.instance, nowhere)
            gap = _gap(request, now)
            everything.gaps.append(gap)
            there.gaps.append(gap)
        return everything, by_instance

    def _typical_request(self) -> Demand:
        """What a new request is likely to be. Until requests have answered: as those that wait."""
        prompts = self._typical or [(request.prompt, request.prompt) for request in self._waiting.values()]
        return Demand(
            own=fmean(uncached for uncached, _ in prompts) if prompts else 1.0,
            prompt=fmean(whole for _, whole in prompts) if prompts else 1.0,
            output=fmean(tokens for _, tokens in self._ended) if self._ended else 0.0,
            decode_s=fmean(seconds for seconds, _ in self._ended) if self._ended else 0.0,
        )

    def _demand(
        self, typical: Demand, report: InstanceReport, now: float, measured: _Measured, there: _Open, joining: float
    ) -> Demand:
        ahead = report.load.lacking
        if report.role != "decode":  # there, what comes has its first token
            recent = sum(request.lacking for request in there.waiting if request.submitted > now - REPORT_S)
            ahead = min(ahead + recent, sum(request.lacking for request in there.waiting))
        return msgspec.structs.replace(
            typical,
            ahead=float(ahead),
            joining=joining,
            token_rate=0.0 if report.role == "decode" else sum(measured.tokens.values(now)) / RATE_S,
        )

    def _instance(
        self, report: InstanceReport, now: float, measured: _Measured, there: _Open, demand: Demand
    ) -> InstanceSlo:
        prefill = decode = None
        if report.role != "decode":
            prefill = _predicting(self._ttft(measured, there, now), predict_ttft(report, demand))
        if report.role != "prefill":
            decode = _predicting(self._tpot(measured, there, now), predict_tpot(report, demand))
        return InstanceSlo(
            index=report.index,
            role=report.role,
            prefill=prefill,
            decode=decode,
            kv_guard=kv_guard(report, demand.ahead),
            report=report,
            demand=demand,
        )

    def _ttft(self, measured: _Measured, there: _Open, now: float) -> Side:
        values = measured.ttft.values(now)
        late = p90_with_ages(values, there.ages)
        return Side(slo_s=self.limits.ttft_s, measured_s=late, samples=len(values) + len(there.ages))

    def _tpot(self, measured: _Measured, there: _Open, now: float) -> Side:
        values = [*measured.tpot.values(now), *there.gaps]
        return Side(slo_s=self.limits.tpot_s, measured_s=p90(values), samples=len(values))


def _gap(request: _Request, now: float) -> float:
    """Seconds per token of a request that goes on, as if its next token came now."""
    assert request.first_at is not None
    return (now - request.first_at) / max(EARLY_TOKENS, len(request.outputs))


def _predicting(measured: Side, seconds: float | None) -> Side:
    return msgspec.structs.replace(measured, predicted_s=seconds)


def _pool(measured: Side, sides: Sequence[tuple[int, Side | None]]) -> PoolSlo:
    """sides: by instance; None of those that are not in the pool."""
    members = [(side.predicted_s, index) for index, side in sides if side is not None]
    predicted = [(seconds, index) for seconds, index in members if seconds is not None]
    least, chosen = min(predicted) if predicted else (None, None)
    return PoolSlo(side=_predicting(measured, least), instances=len(members), chosen=chosen)
