"""Conversations whose turns arrive at random: a shared system prompt, a history that grows, many of them at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.sample import PREFIX, REPLY, TURN, Part, Sample


@dataclass(frozen=True)
class Sessions:
    """sessions: conversations of `turns` turns each. system: tokens of each of `systems` system prompts. question,
    reply: tokens that a turn adds. What the server generated is not known: later prompts repeat made-up replies."""

    sessions: int = 24
    turns: int = 4
    systems: int = 2
    system: int = 512
    question: int = 192
    reply: int = 32
    seed: int = 0

    def samples(self, rate: float) -> list[Sample]:
        """Turns in random order over the sessions, at `rate` requests a second (Poisson); infinity: all at once."""
        rng = random.Random(self.seed)
        order = [session for session in range(self.sessions) for _ in range(self.turns)]
        rng.shuffle(order)
        times = poisson_arrivals(rate, self.seed)
        turn = dict.fromkeys(range(self.sessions), 0)
        samples = []
        for session, at in zip(order, times, strict=False):
            samples.append(Sample(self._parts(session, turn[session]), self.reply, at))
            turn[session] += 1
        return samples

    def _parts(self, session: int, turn: int) -> tuple[Part, ...]:
        parts: list[Part] = [((PREFIX, session % self.systems), self.system)]
        for number in range(turn + 1):
            parts.append(((TURN, session, number), self.question))
            if number < turn:
                parts.append(((REPLY, session, number), self.reply))
        return tuple(parts)

    @property
    def working_set(self) -> int:
        """Tokens of all that is ever reused: each system prompt once, each history once."""
        history = self.turns * self.question + (self.turns - 1) * self.reply
        return self.systems * self.system + self.sessions * history
