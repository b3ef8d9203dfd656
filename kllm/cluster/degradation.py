"""Graded degradation (G5): what is given up when capacity is short, in the order in which it is missed least.

    1  extras    instances drop what only helps later: nothing new is written to the KV store
    2  long      and prompts of several chunks get half the share of the KV cache; requests of low priority do not queue
    3  queue     nobody queues but the urgent: others get 429 once the instances have as much as they run at once, and
                 those of low priority get it always

The grade follows SLO Load: up when it has been above a threshold for a while, down one grade at a time when it has
stayed well below. Pure: time is an argument.
"""

from __future__ import annotations

GRADES = ("none", "extras", "long", "queue")
THRESHOLDS = (1.0, 1.5, 2.5)  # SLO Load above which grade 1, 2, 3 is taken
UP_S = 2.0  # for as long
RELIEF = 0.8  # of the threshold: below it for DOWN_S the grade is left
DOWN_S = 10.0


class Degradation:
    """grade: 0 (nothing is given up) to 3."""

    def __init__(self) -> None:
        self.grade = 0
        self._above_since: float | None = None
        self._below_since: float | None = None

    def update(self, now: float, load: float) -> bool:
        """load: SLO Load of the side that is shorter of capacity. Whether the grade has changed."""
        return self._up(now, load) or self._down(now, load)

    def _up(self, now: float, load: float) -> bool:
        if self.grade == len(THRESHOLDS) or load < THRESHOLDS[self.grade]:
            self._above_since = None
            return False
        if self._above_since is None:
            self._above_since = now
        if now - self._above_since < UP_S:
            return False
        self.grade += 1
        self._above_since = self._below_since = None
        return True

    def _down(self, now: float, load: float) -> bool:
        if self.grade == 0 or load >= RELIEF * THRESHOLDS[self.grade - 1]:
            self._below_since = None
            return False
        if self._below_since is None:
            self._below_since = now
        if now - self._below_since < DOWN_S:
            return False
        self.grade -= 1
        self._above_since = self._below_since = None
        return True


def queue_limit(grade: int, priority: int, max_queue: int, at_once: int) -> int:
    """Requests in flight beyond which one of this priority (less is more urgent, 0 usual) is refused.

    max_queue: the operator's limit. at_once: what the instances run at the same time."""
    limit = max_queue
    if grade >= 3 and priority >= 0:
        limit = at_once if priority == 0 else 0
    elif grade == 2 and priority > 0:
        limit = at_once
    return min(limit, max_queue)
