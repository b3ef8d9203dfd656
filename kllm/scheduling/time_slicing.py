"""Time-sliced separation (capability E2): prompts and the requests that decode take turns on one instance. Pure.

    decode only ......... slice: prompts ....... decode only .........
    t t t t t t t t t t t [  step  |  step  | t] t t t t t t t t t t      t: every decoding request gets a token
    └───── every - 1 ────┘                   └─ the slice's last step

A step that carries prompts is longer for every request that decodes beside them. Here all prompts that wait are put
into slices, `every` tokens of the decoding requests apart, so that all tokens but one in `every` come at the pace of a
step that only decodes. Prompts compute alone and in steps as large as they come, but for the slice's last step, in
which the decoding requests take part again. How long a slice may be is what decoding has left of its target:

    slice + the steps in which a request gets `every` tokens  <=  every · tpot_s

A prompt that has all but its last token in the midst of a slice gets that in the last step: its request has its first
token then, and not a pause after it. So, as far as steps take what was expected, the mean time per token of every
request is at most tpot_s: its n tokens after the first meet at most n / every slices. What steps really took is settled
with the next slice.

Nobody starves. A slice is due every `every` steps however long decoding takes, and has LEAST_SHARE of their time at
least; where nobody decodes prompts have all of it; and a step that would hold nothing by these rules is planned
without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kllm.scheduling.sequence import Sequence

LEAST_SHARE = 1 / 8  # of the time of steps that only decode, for prompts whatever the target
LEAST_TOKENS = 16  # of prompts in a slice
KNOWN_FROM = 32  # tokens of prompts in a step from which it tells how fast they are computed
FORGET = 0.8  # weight of earlier steps, at each new one


class _Step(NamedTuple):
    """A plan in flight. expected_s: what was charged for it. turn: of the slicing it was planned in."""

    planned_at: float
    prompt_tokens: int
    decodes: bool
    expected_s: float
    turn: int


class TimeSlicing:
    """tpot_s: target for the mean seconds per output token of every request. every: tokens between slices.
    step_tokens: most of a step.

    For each plan the scheduler calls begin(), obeys `decodes`, `room` and limit(), then calls planned(); and passed()
    when it commits."""

    def __init__(self, tpot_s: float, every: int, step_tokens: int) -> None:
        self.tpot_s = tpot_s
        self.every = every
        self.step_tokens = step_tokens
        self.decodes = True  # requests that decode take part in the step
        self.room = step_tokens  # tokens of prompts that it may hold
        self.num_slices = 0
        self._open = False
        self._left_s = 0.0  # of the open slice
        self._saved_s = 0.0  # for the next slice
        self._steps = every  # that only decoded, since the last slice
        self._turn = 0  # changes when a slice opens and when it ends
        self._decoding = 0
        self._decode_s: float | None = None  # of a step that only decodes
        self._prompt_s = self._prompt_tokens = 0.0  # what prompts took lately
        self._in_flight: deque[_Step] = deque()
        self._last_commit = 0.0

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Decide what the next plan may hold. waiting: those that there are places for."""
        decoding = need = 0
        for sequence in running:
            backlog = sequence.backlog
            if backlog == 1:
                decoding += 1
            elif backlog:
                need += backlog
        for sequence in waiting:
            if need > self.step_tokens:
                break
            need += sequence.lacking
        self._decoding = decoding
        self.decodes, self.room = True, 0
        if not need or not (self._open or self._due()):
            return
        if not self._open:
            self._open_slice()
        more = need > self.step_tokens
        if not decoding:
            self.decodes, self.room = not (more and self._left_s > 0.0), self.step_tokens
            return
        token_s = self._token_s
        fitting = int(self._left_s / token_s) if token_s else self.step_tokens
        self.decodes = not (more and fitting > self.step_tokens)
        self.room = min(max(fitting, LEAST_TOKENS), self.step_tokens)

    def _due(self) -> bool:
        return not self._decoding or self._steps >= self.every - 1

    def _open_slice(self) -> None:
        self._open = True
        self._turn += 1
        self.num_slices += 1
        decode_s = self._decode_s or 0.0
        saved = self._saved_s if self._decoding else self._most_saved()
        self._left_s = max(saved + self.tpot_s - decode_s, LEAST_SHARE * self.every * decode_s)

    def _most_saved(self) -> float:
        return (self.every - 1) * max(self.tpot_s - (self._decode_s or 0.0), 0.0)

    @property
    def _token_s(self) -> float:
        """Seconds that a token of a prompt takes, as lately."""
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def lift(self) -> bool:
        """Nothing can be planned within the limits. Whether there were any; there are none for this plan now."""
        if self.decodes and self.room >= self.step_tokens:
            return False
        self.decodes, self.room = True, self.step_tokens
        return True

    def limit(self, count: int, backlog: int) -> int:
        """How many of the next `count` tokens of a prompt that lacks `backlog` the step may compute, at least one."""
        return count if self.decodes else max(1, min(count, backlog - 1))

    def planned(self, now: float, num_tokens: int) -> None:
        """The step that begin() opened is planned, with so many tokens."""
        rows = self._decoding if self.decodes else 0
        prompt_tokens = max(num_tokens - rows, 0)
        expected = prompt_tokens * self._token_s + (self._decode_s or 0.0) * (rows > 0)
        if not self.decodes:
            self._left_s -= expected
        elif self._open or prompt_tokens:
            self._end_slice(prompt_tokens * self._token_s)
        else:
            self._steps += 1
            self._save(self.tpot_s - expected)
        self._in_flight.append(_Step(now, prompt_tokens, self.decodes, expected, self._turn))

    def _end_slice(self, seconds: float) -> None:
        """With a step whose prompts are expected to take so long. What is left over is not kept, what is owed is."""
        self._saved_s = min(self._left_s - seconds, 0.0) if self._open else 0.0
        self._open = False
        self._turn += 1
        self._steps = 0

    def _save(self, seconds: float) -> None:
        self._saved_s = min(self._saved_s + seconds, self._most_saved())

    # -- what steps took -------------------------------------------------------------------------------------

    def passed(self, now: float) -> None:
        """The oldest plan has committed. It took the time since the one before, or since it was planned."""
        step = self._in_flight.popleft()
        seconds = now - max(step.planned_at, self._last_commit)
        self._last_commit = now
        if step.turn == self._turn:
            if not step.decodes:
                self._left_s -= seconds - step.expected_s
            else:
                self._save(step.expected_s - seconds)
        if not step.prompt_tokens:
            known = self._decode_s
            self._decode_s = seconds if known is None else FORGET * known + (1.0 - FORGET) * seconds
        elif step.prompt_tokens >= KNOWN_FROM:
            beside = (self._decode_s or 0.0) if step.decodes else 0.0
            self._prompt_s = FORGET * self._prompt_s + max(seconds - beside, 0.0)
            self._prompt_tokens = FORGET * self._prompt_tokens + step.prompt_tokens
