"""SamplingProfiler: where the CPU time of this process's main thread goes, at little cost to what it measures."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 0.001  # of CPU time


class SamplingProfiler:
    """The kernel signals after every millisecond of CPU time, and the main thread notes what it is in: the innermost
    Python function. Time in C counts for the Python function that called it."""

    def __init__(self) -> None:
        self._own: Counter[tuple[str, str, int]] = Counter()
        self._within: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> SamplingProfiler:
        signal.signal(signal.SIGPROF, self._sample)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._own[(frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)] += 1
        seen = set()
        while frame is not None:
            place = (frame.f_code.co_filename, frame.f_code.co_qualname, 0)
            if place not in seen:
                seen.add(place)
                self._within[place] += 1
            frame = frame.f_back

    def profile(self) -> dict[str, Any]:
        """samples; own: lines by samples; within: functions by samples in them or in what they called."""
        return {
            "samples": sum(self._own.values()),
            "own": [[_short(file), name, line, count] for (file, name, line), count in self._own.most_common()],
            "within": [[_short(file), name, count] for (file, name, _), count in self._within.most_common(200)],
        }


def _short(file: str) -> str:
    """From the package's name on."""
    parts = Path(file).parts
    for marker in ("site-packages", "kllm"):
        if marker in parts:
            last = len(parts) - 1 - parts[::-1].index(marker)
            return "/".join(parts[last + (marker == "site-packages") :])
    return "/".join(parts[-2:])
