"""How long the next request would wait for its first token on an instance, and between tokens: from the step times
that the instance reports, and what it holds. Pure.

    one step  = base + row * rows + new_token * tokens + context_token * context          (StepTimes)
    TTFT      = steps * (one step of those that decode) + new_token * (tokens ahead + own) + reading prompts
    TPOT      = one step of those that decode / (1 - share of the time that prompts take)
"""

from __future__ import annotations

import msgspec

from kllm.messages import EngineLoad, Role, StepTimes

SHORTEST_HORIZON_S, USUAL_HORIZON_S, LONGEST_HORIZON_S = 1.0, 10.0, 30.0
HIGH_WATER = 0.9  # of the KV cache


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway knows of an instance that is there. load: its latest report. chunk_tokens: most prompt tokens of a
    request in a step. max_num_seqs: places in its batch. kv_tokens: that its KV cache holds."""

    index: int
    load: EngineLoad
    role: Role = "both"
    chunk_tokens: int = 0
    max_num_seqs: int = 0
    kv_tokens: int = 0


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What comes to an instance. Tokens are uncached prompt tokens.

    ahead: tokens that have to be computed before those of a new request. own: of a typical new request; prompt: all of
    its prompt. joining: requests that will decode there and do not yet. token_rate: tokens a second that it computes,
    lately. output: tokens that a typical request gets. decode_s: from its first to its last. 0: not known.
    """

    ahead: float = 0.0
    own: float = 0.0
    prompt: float = 0.0
    joining: float = 0.0
    token_rate: float = 0.0
    output: float = 0.0
    decode_s: float = 0.0


def predict_ttft(report: InstanceReport, demand: Demand) -> float | None:
    """Seconds from the submission of a typical request to its first token; None while step times are not known."""
    times = report.load.step_times
    if times is None or not times.samples:
        return None
    computing = _computing_s(times, report, demand)
    return max(computing, _room_s(times, report, demand))


def _computing_s(times: StepTimes, report: InstanceReport, demand: Demand) -> float:
    """Until what is ahead and its own prompt are computed. The step that runs when it comes has to end first."""
    load, tokens = report.load, demand.ahead + demand.own
    chunk = max(1, (report.chunk_tokens or round(tokens)) - load.decoding)
    steps = max(1.0, tokens / chunk)
    prompts = min(chunk, tokens) / max(1.0, demand.own)  # of which a step computes tokens
    read = prompts * demand.prompt if prompts >= 1.0 else demand.prompt - demand.own / 2
    beside = _decode_step(times, load.decoding, load.context)
    under_way = beside if load.decoding or demand.ahead else 0.0
    return under_way + steps * (beside + times.row + times.context_token * read) + times.new_token * tokens


def _room_s(times: StepTimes, report: InstanceReport, demand: Demand) -> float:
    """Until so many requests have ended that there is a place and KV for it and those before it: each of those that
    decode ends after as many steps as it gets tokens. 0 where there is room, or nothing is known of ends."""
    load, places, kv = report.load, report.max_num_seqs, report.kv_tokens
    rows, context = float(load.decoding), float(load.context)
    held = context / rows if rows else demand.prompt + demand.output / 2  # KV of a request
    if not rows:  # as many as will fit
        rows = max(1.0, min(kv / held if kv else 1.0, places or 1.0))
        context = rows * held
    short = max(0.0, demand.ahead + demand.own - kv * (1.0 - load.kv_usage)) if kv else 0.0
    ends = max(short / max(1.0, held), load.running + load.waiting + 1.0 - places if places else 0.0)
    return ends * demand.output / rows * _decode_step(times, rows, context) if ends > 0.0 else 0.0


def predict_tpot(report: InstanceReport, demand: Demand) -> float | None:
    """Seconds from token to token in the next while (about as long as a request decodes), for a batch of those that
    decode now and will soon; None while step times are not known."""
    times = report.load.step_times
    if times is None or not times.samples:
        return None
    horizon = min(max(demand.decode_s or USUAL_HORIZON_S, SHORTEST_HORIZON_S), LONGEST_HORIZON_S)
    rows, context = _batch(times, report, demand, horizon)
    alone = _decode_step(times, rows, context)
    busy = times.new_token * (demand.token_rate + demand.ahead / horizon)  # share of the time that prompts take
    full = alone + times.row + times.new_token * max(0.0, report.chunk_tokens - rows)
    return min(full, alone / (1.0 - busy)) if busy < 1.0 else full


def _batch(times: StepTimes, report: InstanceReport, demand: Demand, horizon: float) -> tuple[float, float]:
    """Rows, and tokens of KV that they read, when those that are to join have joined; not less than now. Those that
    decode end meanwhile as they always do."""
    load = report.load
    joined_s = times.new_token * (demand.ahead + demand.own)
    ended = load.decoding * min(1.0, joined_s / horizon)
    rows = max(1.0, load.decoding, load.decoding + demand.joining - ended)
    if report.max_num_seqs:
        rows = min(rows, float(report.max_num_seqs))
    added = max(0.0, rows - load.decoding)
    return rows, load.context + added * demand.prompt


def _decode_step(times: StepTimes, rows: float, context: float) -> float:
    return times.base + (times.row + times.new_token) * rows + times.context_token * context


def kv_guard(report: InstanceReport, ahead: float) -> float:
    """KV that requests hold or will once their prompts are computed, over the high-water mark; at 1 no more should be
    taken. Beside the load, not part of it."""
    coming = ahead / report.kv_tokens if report.kv_tokens else 0.0
    return (report.load.kv_usage + coming) / HIGH_WATER
