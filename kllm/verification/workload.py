"""How much is measured, and the prompts of one run: the same for every variant."""

from __future__ import annotations

from dataclasses import dataclass

from kllm.tokenization.tokenizer import Tokenizer
from kllm.verification import needles, structured, texts
from kllm.verification.needles import Needle
from kllm.verification.structured import StructuredTask


@dataclass(frozen=True)
class Scale:
    """continuations: greedy ones, of `continuation_tokens` after as many tokens of text.
    cached_windows: windows from which log-probabilities are asked for once more, now that they are cached."""

    tokens: int
    continuations: int
    continuation_tokens: int
    needle_tokens: tuple[int, ...]
    needle_depths: tuple[float, ...]
    cached_windows: int


FULL = Scale(20_480, 8, 64, (1000, 2000, 4000), (0.1, 0.5, 0.9), 8)
QUICK = Scale(2_048, 4, 24, (1000,), (0.3, 0.7), 2)


@dataclass(frozen=True)
class Workload:
    windows: list[list[int]]
    openings: list[list[int]]
    continuation_tokens: int
    needles: list[Needle]
    tasks: list[StructuredTask]
    cached_windows: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, output included."""
        return max(
            *(len(window) + 1 for window in self.windows),
            *(len(opening) + self.continuation_tokens for opening in self.openings),
            *(len(task.prompt) + structured.MAX_ANSWER_TOKENS for task in self.tasks),
            *(len(needle.prompt) + needles.MAX_ANSWER_TOKENS for needle in self.needles),
        )

    @property
    def kv_tokens(self) -> int:
        """Room for the longest sequence twice, and for the windows that are to be found in the prefix cache."""
        return max(2 * self.longest, (self.cached_windows + 2) * len(self.windows[0]))

    def needles_within(self, max_model_len: int) -> list[Needle]:
        return [n for n in self.needles if len(n.prompt) + needles.MAX_ANSWER_TOKENS <= max_model_len]


def make_workload(tokenizer: Tokenizer, scale: Scale, window: int) -> Workload:
    """Raises ValueError if there is less text than wanted."""
    text = texts.corpus()
    windows = texts.windows(text, tokenizer, scale.tokens, window)
    return Workload(
        windows=windows,
        openings=[window[: scale.continuation_tokens] for window in windows[: scale.continuations]],
        continuation_tokens=scale.continuation_tokens,
        needles=needles.make_needles(text, tokenizer, scale.needle_tokens, scale.needle_depths),
        tasks=structured.make_structured_tasks(tokenizer),
        cached_windows=min(scale.cached_windows, len(windows)),
    )
