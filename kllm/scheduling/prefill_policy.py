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

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        """Both in queue order. prefilling: have a place and lack more than one token. A sequence comes once."""
        ...

    def settle(self, chosen: Mapping[Sequence, int], prompt_tokens: int) -> None:
        """The step is planned: what each sequence computes in it, and how much of that is prompts."""
        ...


class FirstCome:
    """Whoever came first computes all of its prompt first (fcfs, priority)."""

    looks_ahead = False
    num_yields = 0

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        yield from prefilling
        yield from waiting

    def settle(self, chosen: Mapping[Sequence, int], prompt_tokens: int) -> None:
        """Nobody is owed anything."""


class FairShare:
    """Fair chunked prefill (capability F1).

    The unit is a chunk of c tokens. A prompt that lacks at most one chunk is short, others are long. In a step

        1. the long prompt that has given way most often, if its quota is a chunk or more
        2. short prompts, in queue order
        3. long prompts, in queue order, with what is left

    A long prompt that gets less than half of what it could use in a step in which others compute prompts gives way: it
    keeps its KV and its place in the prefix tree, and its quota grows by `growth` tokens times the number of times it
    has given way. What it computes in turn 1 is paid from its quota. So short prompts pass long ones at first, and the
    longer a prompt has been passed the more often it gets a chunk before them:

        after n times it has been owed g·n(n+1)/2 tokens, g being the growth

    Long prompts in progress share by the same law: each gives way while another computes. Those in progress are the
    ones whose prompts together fit into `kv_share` of the KV cache, and always the first one; the others wait
    behind them in queue order and begin when one of them has all of its prompt.

    Nobody starves. With m long prompts in progress at once and steps that have a chunk left beside decoding, a prompt
    of L tokens in progress is computed after at most

        2·ceil(L/c) + Y + sum of ceil(Lj/c) + (m - 1)·(2·ceil(L/c) + 1)  steps,

    Y the least n with g·n(n+1)/2 >= L + c, the sum over the others that were in progress before it. For: a step in
    which it does not give way computes half a chunk, so there are at most 2·ceil(L/c) of them. After it has given way Y
    times it is owed all that it needs, and then gives way only to a prompt that has given way as often: an earlier one
    has at most ceil(Lj/c) such turns; a later one has given way less often and catches up by one in a step in which
    ours computes, so all that follow one another in a place have one turn more than there are such steps.
    Y grows with the square root of L: 66 for 8,192 tokens at c = 512 and g = c / 128.
    """

    looks_ahead = True

    def __init__(self, chunk: int, growth: int, kv_tokens: int, kv_share: float) -> None:
        """chunk, growth: tokens. kv_tokens: that the KV cache holds. kv_share: of them, for long prompts."""
        self.chunk = chunk
        self.growth = growth
        self.long_tokens = kv_tokens * kv_share
        self.num_yields = 0
        self._contending: list[tuple[Sequence, int]] = []  # long prompts and what each could use in this step
        self._first: Sequence | None = None

    def turns(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> Iterator[Sequence]:
        long = self._in_progress(prefilling, waiting)
        self._contending = [(sequence, min(sequence.lacking, self.chunk)) for sequence in long]
        owed = [sequence for sequence in long if sequence.quota >= self.chunk]
        first = self._first = max(owed, key=lambda sequence: sequence.yields, default=None)
        if first is not None:
            yield first
        for sequences in (prefilling, waiting):
            for sequence in sequences:
                if sequence.lacking <= self.chunk:
                    yield sequence
        for sequence in long:
            if sequence is not first:
                yield sequence

    def _in_progress(self, prefilling: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Long prompts that may compute, in queue order of those that run and then of those that wait."""
        long = [sequence for sequence in prefilling if sequence.lacking > self.chunk]
        tokens = sum(len(sequence.tokens) for sequence in long)
        for sequence in waiting:
            if sequence.lacking > self.chunk:
                tokens += len(sequence.tokens)
                if long and tokens > self.long_tokens:
                    break
                long.append(sequence)
        return long

    def settle(self, chosen: Mapping[Sequence, int], prompt_tokens: int) -> None:
        for sequence, usable in self._contending:
            got = chosen.get(sequence, 0)
            if sequence is self._first:
                sequence.quota -= got
            if 2 * got < usable and prompt_tokens > got and sequence.state is not State.ENDED:
                sequence.yields += 1
                sequence.quota += self.growth * sequence.yields
                self.num_yields += 1
        self._contending, self._first = [], None
