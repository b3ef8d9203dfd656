"""Sizes of the measurement, and prompts of English technical text that every engine gets alike."""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

COLD, WARM_UP, TTFT, DECODE = 1, 1, 3, 4  # prompts of ordinary length that a visit uses for each


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. batch: prompts at once. shared: tokens of the common prefix in the shared variant."""

    prompt: int = 512
    long: int = 4096
    output: int = 128
    batch: int = 32
    shared: int = 384


FULL = Workload()
QUICK = Workload(prompt=64, long=256, output=8, batch=4, shared=48)


@dataclass(frozen=True)
class Prompts:
    """Token ids, each prompt a passage of its own.

    single: one after another for cold start, warm-up, time to first token, decoding. long: one. batch: at once.
    shared: at once, with a common prefix. No prompt is used twice in a visit, so no cache knows it already.
    """

    single: list[list[int]]
    long: list[list[int]]
    batch: list[list[int]]
    shared: list[list[int]]

    def digest(self) -> str:
        """Names these prompts: results can be compared where it is equal."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def technical_text() -> str:
    """The reference topics that come with Python: some 450 kB of English prose and code, by name."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def make_prompts(encode: Callable[[str], list[int]], workload: Workload) -> Prompts:
    """Cut the text's tokens into prompts, in order. Raises ValueError if there is too little text."""
    tokens = encode(technical_text())
    position = 0

    def take(length: int) -> list[int]:
        nonlocal position
        position += length
        if position > len(tokens):
            raise ValueError(f"the text has {len(tokens)} tokens, the workload needs more")
        return tokens[position - length : position]

    single = [take(workload.prompt) for _ in range(COLD + WARM_UP + TTFT + DECODE)]
    long = [take(workload.long)]
    batch = [take(workload.prompt) for _ in range(workload.batch)]
    prefix = take(workload.shared)
    shared = [prefix + take(workload.prompt - workload.shared) for _ in range(workload.batch)]
    return Prompts(single, long, batch, shared)
