"""Pool policies to compare ours with, and all of them by name."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from kllm.cluster.pool_prediction import Times, fullness, outputs_ahead, prefill_seconds
from kllm.cluster.pool_routing import Choice, GlobalPools, PoolPolicy, PoolSettings, Scores
from kllm.cluster.routing import Candidate
from kllm.request import Request

REMEMBERED = 65_536  # requests whose D was chosen when they arrived: some end before they are handed over
FULL_S = 1e6  # longer than anything takes


class SeparateAlways(GlobalPools):
    """Ours, but every prompt is prefilled by a P, however short."""

    def __init__(self, rng: random.Random | None = None, settings: PoolSettings | None = None) -> None:
        super().__init__(rng, msgspec.structs.replace(settings or PoolSettings(), conditional=False))


class LoadOnly(SeparateAlways):
    """And D is chosen without regard to where KV is and what bringing it costs."""

    def __init__(self, rng: random.Random | None = None, settings: PoolSettings | None = None) -> None:
        super().__init__(rng, msgspec.structs.replace(settings or PoolSettings(), transfer=None))


class RandomDecode(SeparateAlways):
    """P as ours; any D."""

    def handed_over(self, request: Request, outputs: int, source: int, decode: Sequence[Candidate]) -> Choice:
        scores = [(candidate.index, 0.0) for candidate in decode]
        return Choice(self._least(scores), False, "drawn", scores)


class PairedPools(SeparateAlways):
    """Base of those that choose P and D together when a request arrives: the pair whose sum of both stages is least."""

    def arrive(
        self, request: Request, outputs: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Choice:
        if not decode:
            return super().arrive(request, outputs, prefill, decode)
        tokens, times = len(request.prompt_token_ids) + outputs, Times((*prefill, *decode))
        scores, partners = [], {}
        for candidate in prefill:
            reach = self.partners(candidate.index, decode)
            later = self._decoding(request, outputs, candidate.index, reach, times)
            least = min(score for _, score in later)
            scores.append((candidate.index, prefill_seconds(candidate, times.of(candidate), tokens) + least))
            partners[candidate.index] = later
        chosen = self._least(scores)
        self.paired(request, self._least(partners[chosen]))
        return Choice(chosen, all(c.index != chosen for c in decode), "least sum of both stages", scores)

    def partners(self, source: int, decode: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of decode that an instance may hand over to; at least one."""
        return decode

    def paired(self, request: Request, decode: int) -> None:
        """The request has arrived, and this is the D that was best for it then."""

    def _decoding(
        self, request: Request, outputs: int, source: int, decode: Sequence[Candidate], times: Times
    ) -> Scores:
        """Cost of each that passes the guards; of all, beyond any other's, if none does."""
        tokens = len(request.prompt_token_ids) + outputs
        expected = outputs_ahead(request, outputs, self.settings.horizon)
        able, _ = self._able(decode, times, tokens)
        if not able:
            return [(c.index, FULL_S * fullness(c, tokens)) for c in decode]
        return [(c.index, self.decoding_cost(c, times, tokens, expected, c.index == source)) for c in able]


class ChosenTogether(PairedPools):
    """D is chosen with P when a request arrives, and stays chosen; another only if that one is not there any more."""

    def __init__(self, rng: random.Random | None = None, settings: PoolSettings | None = None) -> None:
        super().__init__(rng, settings)
        self._chosen: OrderedDict[str, int] = OrderedDict()

    def paired(self, request: Request, decode: int) -> None:
        self._chosen[request.request_id] = decode
        if len(self._chosen) > REMEMBERED:
            self._chosen.popitem(last=False)

    def handed_over(self, request: Request, outputs: int, source: int, decode: Sequence[Candidate]) -> Choice:
        chosen = self._chosen.pop(request.request_id, None)
        if any(candidate.index == chosen for candidate in decode):
            assert chosen is not None
            return Choice(chosen, False, "chosen when it arrived", [])
        return super().handed_over(request, outputs, source, decode)


class FixedGroups(PairedPools):
    """xPyD: each P hands over to the D's of its own group only, unless none of them is there. A request goes to the
    group whose P and D take least together; within the group D is chosen as ours does.

    groups: indices of the instances of each."""

    def __init__(
        self, groups: Sequence[Sequence[int]], rng: random.Random | None = None, settings: PoolSettings | None = None
    ) -> None:
        super().__init__(rng, settings)
        self._group = {index: frozenset(group) for group in groups for index in group}

    def partners(self, source: int, decode: Sequence[Candidate]) -> Sequence[Candidate]:
        group = self._group.get(source, frozenset())
        return [candidate for candidate in decode if candidate.index in group] or decode

    def handed_over(self, request: Request, outputs: int, source: int, decode: Sequence[Candidate]) -> Choice:
        return super().handed_over(request, outputs, source, self.partners(source, decode))


class GroupsInTurn(FixedGroups):
    """Fixed groups that get requests in turn, as behind a plain load balancer."""

    _last = -1

    def arrive(
        self, request: Request, outputs: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Choice:
        groups = sorted({min(self._group.get(c.index, {c.index})) for c in prefill})
        self._last = next((first for first in groups if first > self._last), groups[0])
        members = self._group.get(self._last, frozenset((self._last,)))
        return super().arrive(request, outputs, [c for c in prefill if c.index in members], decode)


POOL_POLICIES: dict[str, Callable[[random.Random, PoolSettings], PoolPolicy]] = {
    "global": GlobalPools,
    "separate-always": SeparateAlways,
    "load-only": LoadOnly,
    "random-decode": RandomDecode,
    "chosen-together": ChosenTogether,
}


def even_groups(prefill: int, decode: int, groups: int) -> list[list[int]]:
    """The indices of each of so many groups, of instances that are `prefill` P's first and then `decode` D's.

    Raises ValueError if they cannot be split evenly."""
    if groups < 1 or prefill % groups or decode % groups or not prefill or not decode:
        raise ValueError(f"{prefill} prefill and {decode} decode instances cannot be split into {groups} equal groups")
    p, d = prefill // groups, decode // groups
    return [
        [*range(group * p, (group + 1) * p), *range(prefill + group * d, prefill + (group + 1) * d)]
        for group in range(groups)
    ]


def pool_policy(name: str, prefill: int, decode: int, settings: PoolSettings, rng: random.Random) -> PoolPolicy:
    """One of POOL_POLICIES, or groups:N and groups-in-turn:N, for instances that are P's first and then D's.

    Raises ValueError."""
    if name in POOL_POLICIES:
        return POOL_POLICIES[name](rng, settings)
    kind, _, count = name.partition(":")
    if kind not in ("groups", "groups-in-turn") or not count.isdecimal():
        raise ValueError(f"{name!r} is not one of {', '.join(POOL_POLICIES)}, groups:N, groups-in-turn:N")
    groups = even_groups(prefill, decode, int(count))
    return (FixedGroups if kind == "groups" else GroupsInTurn)(groups, rng, settings)
