"""What a request would meet at an instance, in seconds, from what is known of the instance. Pure.

The same three figures serve both pools: the time until it would have prefilled a prompt, the time of its steps while it
decodes, and the time until KV has come to it. How full it is stands beside them: a guard, not a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kllm.cluster.cache_routing import FETCH_L2, FETCH_L3
from kllm.cluster.routing import Candidate
from kllm.messages import StepTimes
from kllm.request import Request

# Of an instance that has not made a step yet, where no other has either: only the ratios matter then.
UNFITTED = StepTimes(base=0.01, row=1e-4, new_token=5e-5, context_token=1e-8)
CHUNK_TOKENS = 2048  # in a step, of an instance that does not say


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """What taking KV from another instance costs: latency_s for each request, and its bytes at bytes_per_s, one request
    after the other. token_bytes: of the KV of a token, for instances that do not say (Candidate.page_bytes)."""

    bytes_per_s: float = 5e9
    latency_s: float = 0.002
    token_bytes: float = 50_000.0

    def seconds(self, tokens: int, candidate: Candidate) -> float:
        """Until so many tokens of KV have come to this instance, after those that are on their way to it."""
        if tokens <= 0:
            return 0.0
        pages = candidate.page_bytes and candidate.block_tokens
        token_bytes = candidate.page_bytes / candidate.block_tokens if pages else self.token_bytes
        return self.latency_s + (candidate.pulling + tokens) * token_bytes / self.bytes_per_s


class Times:
    """The step times of each candidate, as far as its steps tell. One that has made none yet is taken to be as the
    others are (mean). A fit says nothing of what its instance does not do: what a prompt's token costs a D is taken
    from the P's, what a step without a prompt costs a P from the D's."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._fitted: dict[int, StepTimes] = {}
        decoding, tokens = [], []
        for candidate in candidates:
            times, role = candidate.load.step_times, candidate.load.role
            if times is None or not times.samples or candidate.index in self._fitted:
                continue
            self._fitted[candidate.index] = times
            if role != "prefill":
                decoding.append(times)
            if role != "decode":
                tokens.append(token_seconds(candidate, times))
        self.mean = _mean(list(self._fitted.values()))
        self._decoding = _mean(decoding) if decoding else None
        self._token = sum(tokens) / len(tokens) if tokens else None

    def of(self, candidate: Candidate) -> StepTimes:
        """Of its steps with prompts."""
        own = self._fitted.get(candidate.index, self.mean)
        if candidate.load.role == "decode" and self._token is not None:
            return msgspec.structs.replace(own, new_token=self._token)
        return own

    def decoding(self, candidate: Candidate) -> StepTimes:
        """Of its steps while it decodes."""
        own = self.of(candidate)
        if candidate.load.role == "prefill" and self._decoding is not None:
            return msgspec.structs.replace(self._decoding, new_token=token_seconds(candidate, own))
        return own


def token_seconds(candidate: Candidate, times: StepTimes) -> float:
    """Of a prompt, in full chunks: steps that are all full do not tell what is base and what is tokens."""
    return times.new_token + times.base / (candidate.chunk_tokens or CHUNK_TOKENS)


def _mean(each: list[StepTimes]) -> StepTimes:
    if not each:
        return UNFITTED
    count = len(each)
    return StepTimes(
        base=sum(times.base for times in each) / count,
        row=sum(times.row for times in each) / count,
        new_token=sum(times.new_token for times in each) / count,
        context_token=sum(times.context_token for times in each) / count,
        samples=min(times.samples for times in each),
    )


def decoding(candidate: Candidate) -> int:
    """Requests that decode there, others' than this gateway's included."""
    return candidate.assigned - candidate.prefills + candidate.foreign


def context(candidate: Candidate) -> int:
    """Tokens whose KV its requests hold. The gateway counts them as they were when it submitted them; the report also
    knows of others' requests."""
    return max(candidate.holding, candidate.load.context) if candidate.foreign else candidate.holding


def ahead(candidate: Candidate) -> int:
    """Prompt tokens that it has to compute first. The gateway's count takes a prompt for lacking until it has output;
    the report (and what came after it) says how far it is, but is up to a second old: the lesser is nearer."""
    if candidate.unreported is None:
        return candidate.prefilling
    return min(candidate.prefilling, candidate.load.lacking + candidate.unreported)


def lacking(candidate: Candidate, tokens: int) -> float:
    """Of a prompt of so many tokens, those that it has to compute; bringing others up from below counts as a part."""
    fetched = FETCH_L2 * (candidate.l2 - candidate.l1) + FETCH_L3 * (candidate.l3 - candidate.l2)
    return max(1.0, tokens - candidate.l3 + fetched)


def step_seconds(candidate: Candidate, times: StepTimes, tokens: int) -> float:
    """Of its decoding steps with one more request there, which has so many tokens of KV."""
    rows = decoding(candidate) + 1
    return times.base + times.row * rows + times.context_token * (context(candidate) + tokens)


def prefill_seconds(candidate: Candidate, times: StepTimes, tokens: int) -> float:
    """Until it has computed a prompt of so many tokens, after what is before it, beside what it decodes."""
    compute = ahead(candidate) + lacking(candidate, tokens)
    steps = max(1.0, compute / (candidate.chunk_tokens or CHUNK_TOKENS))
    return compute * times.new_token + steps * step_seconds(candidate, times, tokens)


def transfer_seconds(candidate: Candidate, times: StepTimes, tokens: int, cost: TransferCost) -> float:
    """Until the KV of so many tokens is on its device. Only whole blocks that neither device nor host memory has
    travel."""
    whole = tokens // candidate.block_tokens * candidate.block_tokens if candidate.block_tokens else tokens
    brought_up = FETCH_L2 * (candidate.l2 - candidate.l1) * times.new_token
    return brought_up + cost.seconds(whole - candidate.l2, candidate)


def decode_seconds(candidate: Candidate, times: StepTimes, tokens: int, outputs: int) -> float:
    """What decoding so many outputs there costs, beside KV that has to come: the delay of this request, and by how much
    it slows those that are there down.

        prompts that are computed there first + outputs * (step + requests there * what this one adds to a step)
    """
    added = times.row + times.context_token * tokens
    step = step_seconds(candidate, times, tokens)
    return ahead(candidate) * times.new_token + outputs * (step + decoding(candidate) * added)


def fullness(candidate: Candidate, tokens: int) -> float:
    """Share of its KV blocks that would be held with a request of so many tokens; of its places, if that is more and
    they do not suffice."""
    shares = [0.0]
    if candidate.num_blocks and candidate.block_tokens:
        held = max(candidate.load.kv_usage * candidate.num_blocks, candidate.holding / candidate.block_tokens)
        shares.append((held + -(-tokens // candidate.block_tokens)) / candidate.num_blocks)
    if candidate.max_num_seqs and candidate.assigned >= candidate.max_num_seqs:
        shares.append((candidate.assigned + 1) / candidate.max_num_seqs)
    return max(shares)


def outputs_ahead(request: Request, outputs: int, horizon: int) -> int:
    """Outputs that it is expected to decode yet. Its limit says little where that is generous, so it is `horizon` at
    most."""
    most = request.params.max_tokens
    return horizon if most is None else max(1, min(horizon, most - outputs))
