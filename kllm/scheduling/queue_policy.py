"""Queue policies: in which order sequences get what they need. Smaller keys first; arrival makes every order total,
and a sequence can only be preempted for one before it, so the first one always gets on."""

from __future__ import annotations

from collections.abc import Callable

from kllm.scheduling.sequence import Sequence

QueueKey = Callable[[Sequence], tuple[int, int]]


def first_come(sequence: Sequence) -> tuple[int, int]:
    return (0, sequence.arrival)


def by_priority(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.priority, sequence.arrival)


QUEUE_KEYS: dict[str, QueueKey] = {"fcfs": first_come, "fair": first_come, "priority": by_priority}
