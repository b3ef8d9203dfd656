"""Breaker: keeps requests away from an instance that fails them, and tries it again with one at a time.

    closed ──too many of the latest requests failed──► open ──pause over──► half-open ──success──► closed
                                                        ▲                       │
                                                        └────── failure ────────┘   each pause twice as long

Deaths are the slot's business (it restarts, with backoff); this is for an instance that lives and answers requests with
errors, or loses them. Pure: time is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

WINDOW = 20  # latest requests that count
LEAST_FAILURES = 5  # of them, and half of all
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0

BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """Of one slot. trips: how often it opened."""

    def __init__(self) -> None:
        self.trips = 0
        self._latest: deque[bool] = deque(maxlen=WINDOW)  # True: failed
        self._open_until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._trying = False

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether the instance may get a request now; half-open, only while none is there to try it with."""
        state = self.state(now)
        return state == "closed" or (state == "half-open" and not self._trying)

    def submitted(self, now: float) -> None:
        """A request went there."""
        self._trying = self.state(now) == "half-open"

    def succeeded(self) -> None:
        """A request got on there."""
        self._latest.append(False)
        if self._open_until is not None and self._trying:
            self.reset()

    def undecided(self) -> None:
        """A request left without a result: another one may be tried."""
        self._trying = False

    def failed(self, now: float) -> bool:
        """A request failed there, by the instance's fault. Whether this opens it."""
        self._latest.append(True)
        failures = sum(self._latest)
        if self.state(now) == "open":
            return False
        if self._open_until is None and (failures < LEAST_FAILURES or 2 * failures < len(self._latest)):
            return False
        self._open_until = now + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        self._trying = False
        self.trips += 1
        return True

    def reset(self) -> None:
        """It works, or another incarnation is there."""
        self._latest.clear()
        self._open_until = None
        self._pause_s = FIRST_PAUSE_S
        self._trying = False
