"""Time-sliced separation (capability E2): when prompts compute, and for how long, beside requests that decode. Pure.

A budget of time is kept for the requests that decode. Each step that gives them a token earns the target `tpot_s`,
each second that passes is paid from it, and it holds at most `pause_s`:

    budget ──┬─ + tpot_s with every step in which they decode
             └─ - the seconds that every step takes;   at most pause_s - tpot_s is kept

    prompts get, in a step: what the budget allows beyond the time that decoding needs

So n tokens after the first take a request at most n · tpot_s + (pause_s - tpot_s) seconds, as far as steps take what
was predicted; what they really took is settled afterwards. The two ends of pause_s are two ways to separate:

    pause_s = tpot_s    every step carries as many prompt tokens as fit beside its decoding ones: no token comes later
                        than tpot_s after the one before
    pause_s > tpot_s    steps that only decode save up for slices, in which prompts compute alone, in steps as large as
                        they come; only the slice's last step decodes too

Decoding that alone takes longer than the target leaves prompts a share of the time, so that they always get on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kllm.costs.nnls import solve_nonnegative
from kllm.scheduling.sequence import Sequence

LEAST_SHARE = 1 / 8  # of the time of steps that only decode, for prompts whatever the target
LEAST_TOKENS = 16  # of a prompt in a step, if any
WINDOW = 96  # steps that are remembered
MIN_STEPS = 8  # before predictions are believed
REFIT_EVERY = 8
UNKNOWN_TOKENS = 128  # of prompts in the first step with some; then twice, three and four times as many


@dataclass(slots=True)
class Work:
    """What a step computes, as far as its time depends on it.

    rows: that decode. context: tokens whose KV they read. tokens: of prompts. pairs: Σ of tokens attended to by them.
    """

    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def add(self, start: int, count: int) -> None:
        """count tokens of a prompt, after start whose KV exists."""
        self.tokens += count
        self.pairs += count * (start + 0.5 * count)


class LearnedTimes:
    """Seconds of a step, learned from the last steps; those with prompts and those without by themselves."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[tuple[tuple[float, ...], float]]] = {
            True: deque(maxlen=WINDOW),
            False: deque(maxlen=WINDOW),
        }
        self._since = {True: 0, False: 0}
        self._costs = {True: [0.0] * 5, False: [0.0] * 3}
        self.num_seen = {True: 0, False: 0}

    def knows(self, prompts: bool) -> bool:
        return self.num_seen[prompts] >= MIN_STEPS

    def seconds(self, work: Work) -> float:
        prompts = work.tokens > 0
        return sum(c * x for c, x in zip(self._costs[prompts], _features(work), strict=True))

    def tokens_within(self, seconds: float, start: int) -> int:
        """Tokens of a prompt after its first `start` that take so long in a step that holds others."""
        token, pair = self._costs[True][2:4]
        first = token + pair * start  # of the first token; each costs `pair` more than the one before
        if pair * seconds < 1e-6 * first * first:
            return int(seconds / first) if first > 0.0 else 1 << 30
        return int(((first * first + 2.0 * pair * seconds) ** 0.5 - first) / pair)

    def observe(self, work: Work, seconds: float) -> None:
        prompts = work.tokens > 0
        self._seen[prompts].append((_features(work), seconds))
        self.num_seen[prompts] += 1
        self._since[prompts] += 1
        if self._since[prompts] >= REFIT_EVERY or self.num_seen[prompts] <= MIN_STEPS:
            self._since[prompts] = 0
            self._fit(prompts)

    def _fit(self, prompts: bool) -> None:
        """By relative error: a step of half the time counts as much."""
        seen = self._seen[prompts]
        features = np.array([x for x, _ in seen])
        seconds = np.array([y for _, y in seen])
        self._costs[prompts] = solve_nonnegative(features / seconds[:, None], np.ones(len(seen))).tolist()


def _features(work: Work) -> tuple[float, ...]:
    if work.tokens:
        return (1.0, work.rows, work.tokens, work.pairs, work.context)
    return (1.0, work.rows, work.context)


class TimeSlicing:
    """tpot_s: target of the mean seconds per token of requests that decode. pause_s: the longest time that they get
    no token for, at least tpot_s.

    begin() opens a step, grant() gives prompts their part of it, planned() closes it, passed() says what it took."""

    def __init__(self, tpot_s: float, pause_s: float, full_tokens: int) -> None:
        """full_tokens: most of a step."""
        self.tpot_s = tpot_s
        self.pause_s = max(pause_s, tpot_s)
        self.full_tokens = full_tokens
        self.times = LearnedTimes()
        self.credit = 0.0
        self.num_slices = 0
        self.slice_s = 0.0
        self._in_slice = False
        self._work = Work()
        self._limited = False
        self._room_s = 0.0
        self._room_tokens = 0
        self._rides = True
        self._in_flight: deque[tuple[float, Work, float]] = deque()
        self._last_commit = 0.0

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> bool:
        """Whether the requests that decode take part in the step that is planned now."""
        work = self._work = Work()
        need = 0
        for sequence in running:
            backlog = sequence.backlog
            if backlog == 1:
                work.rows += 1
                work.context += sequence.planned + 1
            elif backlog:
                need += backlog
        for sequence in waiting:
            if need > 64 * self.full_tokens:
                break
            need += sequence.lacking
        self._rides = True
        self._limited = work.rows > 0
        if not work.rows:
            self.credit = 0.0
            self._in_slice = False
            return True
        if not need:
            self._in_slice = False
            return True
        return self._divide(need)

    def _divide(self, need: int) -> bool:
        times, work = self.times, self._work
        if not (times.knows(True) and times.knows(False)):
            self._room_s = float("inf")
            self._room_tokens = UNKNOWN_TOKENS * (1 + times.num_seen[True] % 4)
            return True
        self._room_tokens = 1 << 30
        alone = times.seconds(work)
        pace = self._pace(alone)
        allowed = self.credit + pace
        beside = Work(work.rows, work.context, LEAST_TOKENS, 0.0)
        mixed = times.seconds(beside)
        longest = max(self.pause_s, 2 * alone)
        if self.pause_s > self.tpot_s and not self._in_slice:
            full = times.seconds(Work(work.rows, work.context, need, 0.0))
            if allowed < min(longest, full) * 0.999:
                self._room_s = 0.0
                return True
            self._in_slice = True
            self.num_slices += 1
        room = allowed - mixed
        self._room_s = room
        if room <= 0:
            self._in_slice = False
            return True
        if self.pause_s > self.tpot_s:
            step = times.seconds(Work(0, 0, self.full_tokens, 0.0))
            if need > self.full_tokens and allowed > step + mixed:
                self._rides = False
                self._room_s = float("inf")
            else:
                self._in_slice = False
        return self._rides

    def _pace(self, alone: float) -> float:
        return max(self.tpot_s, (1.0 + LEAST_SHARE) * alone)

    @property
    def spent(self) -> bool:
        """Nothing is left of the step for prompts."""
        return self._limited and (self._room_s <= 0.0 or self._room_tokens <= 0)

    def grant(self, start: int, wanted: int) -> int:
        """How many of the next tokens of a prompt, after its first `start`, the step has time for: at least one."""
        count = wanted
        if self._limited:
            if self._room_s != float("inf"):
                count = min(count, max(LEAST_TOKENS, self.times.tokens_within(self._room_s, start)))
            count = min(count, max(1, self._room_tokens))
            before = self.times.seconds(self._work)
        self._work.add(start, count)
        if self._limited:
            self._room_tokens -= count
            if self._room_s != float("inf"):
                c = self.times._costs[True]
                self._room_s -= c[2] * count + c[3] * count * (start + 0.5 * count)
                if count < wanted:
                    self._room_s = 0.0
        return count

    def planned(self, now: float, decodes: bool) -> None:
        work = self._work
        if not decodes:
            self.slice_s += 1
            work.rows = work.context = 0
        predicted = 0.0
        if self._limited and self.times.knows(work.tokens > 0):
            predicted = self.times.seconds(work)
            if decodes:
                alone = self.times.seconds(Work(work.rows, work.context))
                pace = self._pace(alone)
                self.credit += pace - predicted
                self.credit = max(min(self.credit, max(self.pause_s, 2 * alone) - pace), -self.pause_s)
            else:
                self.credit -= predicted
        self._in_flight.append((now, work, predicted))

    def passed(self, now: float) -> None:
        planned_at, work, predicted = self._in_flight.popleft()
        seconds = now - max(planned_at, self._last_commit)
        self._last_commit = now
        if predicted:
            self.credit -= seconds - predicted
        if seconds > 0.0:
            self.times.observe(work, seconds)
