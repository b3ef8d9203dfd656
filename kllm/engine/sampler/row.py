"""What the sampler keeps for one request from its first step to its last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kllm.request import MIN_TEMPERATURE, SamplingParams
from kllm.scheduling.plan import NewRow

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of one row and how often each occurs in its output (0: in the prompt only).

    append() is O(1); `ids` and `counts` are views that the next append may change.
    """

    def __init__(self, prompt: Iterable[int], outputs: Iterable[int]) -> None:
        occurrences = Counter(outputs)
        ids = dict.fromkeys(prompt) | dict.fromkeys(occurrences)
        self._place = {token: i for i, token in enumerate(ids)}
        self._ids = np.fromiter(ids, np.int64, len(ids))
        self._counts = np.fromiter((occurrences[token] for token in ids), np.float32, len(ids))

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self._place)]

    def append(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                grown = max(64, 2 * place)
                self._ids = np.resize(self._ids, grown)
                self._counts = np.resize(self._counts, grown)
            self._ids[place] = token
            self._counts[place] = 0
        self._counts[place] += 1


class BadWords:
    """Words of several tokens that must not be completed. Matched against the output only, as in vLLM."""

    def __init__(self, words: Iterable[tuple[int, ...]], outputs: Sequence[int]) -> None:
        # By the token before the last, so that a step looks only at words that may be completed now.
        self._words: dict[int, list[tuple[list[int], int]]] = {}
        longest = 1
        for *prefix, last in words:
            self._words.setdefault(prefix[-1], []).append((prefix, last))
            longest = max(longest, len(prefix))
        self._longest = longest
        self._tail = list(outputs[-longest:])

    def append(self, token: int) -> None:
        self._tail.append(token)
        if len(self._tail) > 2 * self._longest:
            del self._tail[: -self._longest]

    def banned(self) -> list[int]:
        """Tokens that would complete a word now."""
        if not self._tail:
            return []
        return [last for prefix, last in self._words.get(self._tail[-1], ()) if self._tail[-len(prefix) :] == prefix]


class RowState:
    """One row: its parameters in the form a step needs, and as much of its history as they look at.

    Token ids outside the vocabulary are dropped: such a token is never sampled anyway.
    plain: argmax of the untouched logits is the answer and nothing is reported beside it.
    """

    def __init__(self, new_row: NewRow, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        p = self.params = new_row.params
        self.seed = new_row.seed
        self.num_prompt = new_row.num_prompt
        self.greedy = p.greedy
        self.temperature = max(p.temperature, MIN_TEMPERATURE)
        self.top_k = p.top_k if 0 < p.top_k < vocab_size else 0
        prompt, outputs = new_row.tokens[: new_row.num_prompt], new_row.tokens[new_row.num_prompt :]

        self.allowed = None if p.allowed_token_ids is None else _ids(p.allowed_token_ids, vocab_size)
        self.banned = _ids((word[0] for word in p.bad_words_token_ids if len(word) == 1), vocab_size)
        stops = (*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids))
        self.stops = _ids(stops if p.min_tokens > 0 else (), vocab_size)
        bias = {token: value for token, value in (p.logit_bias or {}).items() if 0 <= token < vocab_size}
        self.bias_ids = np.fromiter(bias, np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.counts = _token_counts(p, prompt, outputs, vocab_size)
        words = [w for w in p.bad_words_token_ids if len(w) > 1 and all(0 <= token < vocab_size for token in w)]
        self.bad_words = BadWords(words, outputs) if words else None

        self.processed = (
            self.allowed is not None
            or self.counts is not None
            or self.bad_words is not None
            or bool(self.banned.size or self.stops.size or self.bias_ids.size)
        )
        self.plain = self.greedy and not self.processed and p.logprobs is None

    def append(self, token: int) -> None:
        """`token` was sampled."""
        if self.counts is not None:
            self.counts.append(token)
        if self.bad_words is not None:
            self.bad_words.append(token)

    def banned_at(self, position: int) -> Ids:
        """Ids that bad words and min_tokens forbid for the token at `position`, possibly with repeats."""
        banned = self.banned
        if self.bad_words is not None and (completing := self.bad_words.banned()):
            banned = np.concatenate([banned, np.array(completing, np.int64)])
        if self.stops.size and position - self.num_prompt < self.params.min_tokens:
            banned = np.concatenate([banned, self.stops])
        return banned


def _ids(tokens: Iterable[int], vocab_size: int) -> Ids:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), np.int64)


def _token_counts(p: SamplingParams, prompt: list[int], outputs: list[int], vocab_size: int) -> TokenCounts | None:
    if p.repetition_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0:
        return None
    # Only the repetition penalty looks at the prompt; without it the prompt would be carried along for nothing.
    repeated = prompt if p.repetition_penalty != 1.0 else ()
    return TokenCounts(
        (token for token in repeated if 0 <= token < vocab_size),
        (token for token in outputs if 0 <= token < vocab_size),
    )
