"""Is a block cheaper fetched or computed again? Both costs are learned from what was seen, with forgetting."""

from __future__ import annotations

from typing import Literal

FORGET = 0.97  # weight of what was known before, at each observation
SKIPPED = 0.98  # a source that is avoided is believed to become faster, so that it is tried again some time


class LearnedLine:
    """y = a·x1 + b·x2, a and b never negative: least squares over what was seen, older observations counting less.

    a, b: what is believed before anything was seen; it counts as two observations at (x1, 0) and (0, x2)."""

    def __init__(self, a: float, b: float, x1: float, x2: float) -> None:
        self._s11, self._s22, self._s12 = x1 * x1, x2 * x2, 0.0
        self._sy1, self._sy2 = a * x1 * x1, b * x2 * x2
        self.a, self.b = a, b

    def observe(self, x1: float, x2: float, y: float) -> None:
        self._s11 = FORGET * self._s11 + x1 * x1
        self._s22 = FORGET * self._s22 + x2 * x2
        self._s12 = FORGET * self._s12 + x1 * x2
        self._sy1 = FORGET * self._sy1 + x1 * y
        self._sy2 = FORGET * self._sy2 + x2 * y
        self._solve()

    def scale(self, factor: float) -> None:
        """Believe in another speed: every y seen so far times `factor`."""
        self._sy1 *= factor
        self._sy2 *= factor
        self._solve()

    def _solve(self) -> None:
        determinant = self._s11 * self._s22 - self._s12 * self._s12
        if determinant > 1e-9 * self._s11 * self._s22:
            self.a = (self._sy1 * self._s22 - self._sy2 * self._s12) / determinant
            self.b = (self._sy2 * self._s11 - self._sy1 * self._s12) / determinant
            if self.a >= 0.0 and self.b >= 0.0:
                return
        by_a, by_b = self._sy1 * self._sy1 * self._s22, self._sy2 * self._sy2 * self._s11  # which explains more alone
        self.a, self.b = (self._sy1 / self._s11, 0.0) if by_a >= by_b else (0.0, self._sy2 / self._s22)

    def predict(self, x1: float, x2: float) -> float:
        return self.a * x1 + self.b * x2


Source = Literal["l2", "l3", "peer"]


class Prediction:
    """page_bytes, block_tokens: of one block.

    Computing costs seconds per token and per pair of tokens that attend to each other; fetching costs seconds per call
    and per byte. Before anything was seen fetching is believed to be fast, so that it is tried."""

    def __init__(self, page_bytes: int, block_tokens: int) -> None:
        self._page_bytes = page_bytes
        self._block_tokens = block_tokens
        self._compute = LearnedLine(1e-3, 1e-9, 1024.0, 1024.0**2)
        self._fetch: dict[Source, LearnedLine] = {
            "l2": LearnedLine(1e-5, 1e-11, 1.0, 4e6),
            "l3": LearnedLine(1e-4, 5e-11, 1.0, 4e6),
            "peer": LearnedLine(1e-4, 5e-11, 1.0, 4e6),
        }

    def computed(self, tokens: int, attended: int, seconds: float) -> None:
        """A step that mostly computed prompts took this long. attended: sum over its tokens of tokens attended to."""
        self._compute.observe(tokens, attended, seconds)

    def fetched(self, source: Source, blocks: int, seconds: float) -> None:
        self._fetch[source].observe(1.0, blocks * self._page_bytes, seconds)

    def compute_s(self, depth: int, blocks: int) -> float:
        """To compute `blocks` after the first `depth` blocks of a prompt."""
        tokens = blocks * self._block_tokens
        return self._compute.predict(tokens, tokens * (depth * self._block_tokens + 0.5 * tokens))

    def fetch_s(self, source: Source, blocks: int) -> float:
        return self._fetch[source].predict(1.0, blocks * self._page_bytes)

    def worth(self, depth: int, runs: list[tuple[Source, int]]) -> int:
        """How many blocks of these runs, which follow each other from `depth` on, to fetch: the leading runs that save
        most time together, 0 if none does."""
        best = saved = 0.0
        chosen = fetched = 0
        for source, blocks in runs:
            saved += self.compute_s(depth + fetched, blocks) - self.fetch_s(source, blocks)
            fetched += blocks
            if saved > best:
                best, chosen = saved, fetched
        if chosen < fetched:
            for source in {source for source, _ in runs}:
                self._fetch[source].scale(SKIPPED)
        return chosen
