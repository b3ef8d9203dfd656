"""What was measured lately: values of the last so many seconds, and what all but a tenth of them stay below."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kllm.telemetry.statistics import percentile

MOST = 4096  # values kept; beyond that the oldest go first
SHARE = 90.0  # percent


class Window:
    """Values of the last `seconds`. Times must not go back."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))

    def values(self, now: float) -> list[float]:
        """Those added after now - seconds, oldest first."""
        kept = self._values
        while kept and kept[0][0] <= now - self.seconds:
            kept.popleft()
        return [value for _, value in kept]


def p90(values: Iterable[float]) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    return percentile(ordered, SHARE) if ordered else 0.0


def p90_with_ages(values: list[float], ages: Iterable[float]) -> float:
    """The same of latencies, where some are still open and will be at least as long as their age.

    A young one says nothing yet: ages raise the figure or leave it, so that a burst that has just come cannot hide that
    those before it were served late."""
    return max(p90(values), p90([*values, *ages]))
