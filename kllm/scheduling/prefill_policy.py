"""Prefill policies: in which order prompts get what decoding leaves of a step. Pure.

A policy yields sequences in the order in which they may take tokens, each at most a chunk; the scheduler admits those
that wait, as far as places and KV allow, until the step is full. Afterwards the policy learns who got how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from kllm.scheduling.sequence import Sequence, State


class PrefillPolicy(Protocol):
    """looks_ahead: it wants to know how much of a waiting sequence the cache has (Sequence.expected)."""

    looks_ahead: bool
    num_yields: int  # times that a prompt gave way to others
    most_yields: int  # of one prompt
    quota_tokens: int  # prompt tokens computed before others, from a quota

    def shrink_long(self, factor: float) -> None:
        """Of the KV that long prompts in progress may need together, what they may need now: 1 all of it."""
        ...

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        """Both in queue order. prefilling: have a place and lack more than one token. A sequence comes once."""
        ...

    def settle(self, chosen: Mapping[Sequence, int]) -> None:
        """The step is planned: what each sequence computes in it (one token: it decodes)."""
        ...


class FirstCome:
    """Whoever came first computes all of its prompt first (fcfs, priority)."""

    looks_ahead = False
    num_yields = most_yields = quota_tokens = 0

    def shrink_long(self, factor: float) -> None:
        pass  # no prompt is long to it

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        yield from prefilling
        yield from waiting

    def settle(self, chosen: Mapping[Sequence, int]) -> None:
        """Nobody is owed anything."""


class FairShare:
    """Fair chunked prefill (capability F1).

    The unit is a chunk of c tokens. A prompt that lacks at most one chunk is short, others are long. In a step

        1. the leading long prompt, if the quota is a chunk or more
        2. short prompts, in queue order
        3. long prompts, the leading one first, with what is left

    A long prompt gives way in a step in which it gets less than half of what it could use, and another long one gets
    its half or a prompt that came later computes. It keeps its KV and its place in the prefix tree, and for its n-th
    time it is owed g·n tokens, g being the growth:

        after n times it has been owed g·n(n+1)/2 tokens

    Quota: where short prompts that came later made it give way, what is owed for that goes to the quota of the long
    prompts (of those that gave way in a step, the largest), and what they compute in turn 1 is paid from it. So short
    prompts pass long ones at first, and the longer these are passed the more often they get a chunk before short ones,
    however many they are. Waiting for short prompts that came before earns nothing. The quota ends with the last long
    prompt.

    Sharing: the leading one is that which has been owed most whole chunks, in queue order where that is the same. So
    the first leads for a while, and then those in progress take turns, ever shorter ones. In progress are those whose
    prompts together fit into `kv_share` of the KV cache, and always the first one; the others wait behind them in queue
    order and begin when one of them has all of its prompt.

    Nobody starves. With m long prompts in progress at once and steps that have a chunk left beside decoding, a prompt
    of L tokens in progress is computed after at most

        K + 2·ceil(E/c) + T + Y  steps,   K = 2·ceil(L/c),   T = sum of 2·ceil(Lj/c) + (m - 1)·(K + 1),

    Y the least n with g·n(n+1)/2 >= L + (T + 1)·c, E what short prompts that came before it lacked then, the sum over
    the other long ones that were in progress before it. For, of steps in which it

        gets its half            there are at most K: each computes half a chunk
        does not, since all      there are at most 2·ceil(E/c): half a chunk or more goes to them
        others are short and
        came before it
        does not, and another    there are at most T: one that came before it has no more; one that came later and leads
        long one gets its half   has given way more often, starts with less, and comes nearer only in one of those K
        does not otherwise       there are at most Y: the n-th adds at least g·n to the quota, none comes while that is
                                 a chunk, and only those K and T take from it
    """

    looks_ahead = True

    def __init__(self, chunk: int, growth: int, kv_tokens: int, kv_share: float) -> None:
        """chunk, growth: tokens. kv_tokens: that the KV cache holds. kv_share: of them, for long prompts."""
        self.chunk = chunk
        self.growth = growth
        self.long_tokens = kv_tokens * kv_share
        self._shrunk = 1.0
        self.quota = 0  # tokens that long prompts may compute before short ones
        self.num_yields = self.most_yields = self.quota_tokens = 0
        self._contending: dict[Sequence, int] = {}  # long prompts and what each could use in this step
        self._first: Sequence | None = None

    def shrink_long(self, factor: float) -> None:
        self._shrunk = factor

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        chunk = self.chunk  # what a waiting sequence lacks is spelt out below: a call for each would double the cost
        long = self._in_progress(prefilling, [s for s in waiting if len(s.tokens) - s.expected > chunk])
        self._contending = {sequence: min(sequence.lacking, chunk) for sequence in long}
        long.sort(key=self._chunks_owed, reverse=True)  # stable
        if not long:
            self.quota = 0
        first = self._first = long[0] if self.quota >= chunk else None
        if first is not None:
            yield first
        for sequence in prefilling:
            if sequence.lacking <= chunk:
                yield sequence
        for sequence in waiting:
            if len(sequence.tokens) - sequence.expected <= chunk:
                yield sequence
        for sequence in long:
            if sequence is not first:
                yield sequence

    def _in_progress(self, prefilling: Seq[Sequence], waiting_long: Seq[Sequence]) -> list[Sequence]:
        """Long prompts that may compute, in queue order of those that run and then of those that wait."""
        long = [sequence for sequence in prefilling if sequence.lacking > self.chunk]
        tokens = sum(len(sequence.tokens) for sequence in long)
        for sequence in waiting_long:
            tokens += len(sequence.tokens)
            if long and tokens > self.long_tokens * self._shrunk:
                break
            long.append(sequence)
        return long

    def _chunks_owed(self, sequence: Sequence) -> int:
        return self.growth * sequence.yields * (sequence.yields + 1) // (2 * self.chunk)

    def settle(self, chosen: Mapping[Sequence, int]) -> None:
        contending, first = self._contending, self._first
        if not contending:
            return
        if first is not None:
            self.quota -= chosen.get(first, 0)
            self.quota_tokens += chosen.get(first, 0)
        served = any(2 * chosen.get(sequence, 0) >= usable for sequence, usable in contending.items())
        prompts = [sequence for sequence, count in chosen.items() if count > 1]
        latest = max((sequence.arrival for sequence in prompts), default=-1)
        latest_short = max((sequence.arrival for sequence in prompts if sequence not in contending), default=-1)
        most = 0
        for sequence, usable in contending.items():
            if 2 * chosen.get(sequence, 0) >= usable or not (served or latest > sequence.arrival):
                continue
            if sequence.state is not State.ENDED:
                sequence.yields += 1
                self.num_yields += 1
                self.most_yields = max(self.most_yields, sequence.yields)
                if latest_short > sequence.arrival:
                    most = max(most, sequence.yields)
        self.quota += self.growth * most
        self._contending, self._first = {}, None
