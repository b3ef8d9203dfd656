"""What a load generator sends: samples with token ids, output lengths and arrival times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

LOWEST_TOKEN = 256  # ids below are special and single-byte tokens in most vocabularies


@dataclass(frozen=True)
class Sample:
    """One request to send.

    arrival_s: seconds after the start of the run.
    after: index of the sample (earlier in the same list) that must have ended before this one may go; the request is
    then sent `arrival_s` seconds after that end: the next turn of a conversation.
    """

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float = 0.0
    after: int | None = None


class TokenSource:
    """Seeded token ids: the same seed and key give the same tokens, in any order of asking.

    A key names a run of tokens, such as a trace's block id: equal keys, equal tokens; different keys, different ones.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
        self._high = vocab_size

    def take(self, length: int, *key: int) -> list[int]:
        """`length` token ids. A longer run of the same key starts with the shorter one."""
        rng = np.random.default_rng([self._seed, *key])
        tokens: list[int] = rng.integers(self._low, self._high, size=length).tolist()
        return tokens


def random_samples(
    count: int, input_len: int, output_len: int, source: TokenSource, spread: float = 0.0, seed: int = 0
) -> list[Sample]:
    """Independent random prompts. Lengths are uniform within ± `spread` (0 to 1) of those given."""
    rng = np.random.default_rng([seed, 1])
    inputs, outputs = _lengths(rng, input_len, spread, count), _lengths(rng, output_len, spread, count)
    return [
        Sample(source.take(length, 0, index), output)
        for index, (length, output) in enumerate(zip(inputs, outputs, strict=True))
    ]


def shared_prefix_samples(
    count: int, num_prefixes: int, prefix_len: int, input_len: int, output_len: int, source: TokenSource
) -> list[Sample]:
    """Prompts of `prefix_len` shared tokens and `input_len` tokens of their own; prefixes take turns."""
    prefixes = [source.take(prefix_len, 1, index) for index in range(num_prefixes)]
    return [
        Sample(prefixes[index % num_prefixes] + source.take(input_len, 0, index), output_len) for index in range(count)
    ]


def fitting(samples: Sequence[Sample], max_model_len: int | None) -> list[Sample]:
    """Those samples that a model of this length can serve, with `after` renumbered.

    A turn whose predecessor is dropped is dropped too: its prompt would continue something that never ran.
    """
    if max_model_len is None:
        return list(samples)
    kept: list[Sample] = []
    new_index: dict[int, int] = {}
    for index, sample in enumerate(samples):
        if len(sample.prompt_token_ids) + sample.output_len > max_model_len:
            continue
        if sample.after is not None:
            if sample.after not in new_index:
                continue
            sample = replace(sample, after=new_index[sample.after])
        new_index[index] = len(kept)
        kept.append(sample)
    return kept


def _lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> list[int]:
    low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths
