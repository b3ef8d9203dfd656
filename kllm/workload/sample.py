"""What is sent: samples that name the runs of tokens of their prompts, and the source that makes the tokens.

A sample holds keys and lengths, not tokens: a trace of 100 million prompt tokens fits into a few megabytes, and a
prompt exists only while it is needed.

    Sample.parts     (key, length)    (key, length)   ...
                          |                |
    TokenSource       t t t t ...      t t t ...          equal keys, equal tokens
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

LOWEST_TOKEN = 256  # ids below are special and single-byte tokens in most vocabularies
MOST_IDS = 1 << 14  # different ids of a source: their objects fit into a processor's cache, which halves the time
LONGEST_CACHED_RUN = 4096  # tokens; with the number of runs this bounds the memory of a source

Key = tuple[int, ...]
Part = tuple[Key, int]


# First number of a key: what a run of tokens is, so that runs of different kinds never have equal keys.
OWN = 0  # (OWN, request): a prompt's own tokens
PREFIX = 1  # (PREFIX, prefix): shared by several prompts
BLOCK = 2  # (BLOCK, id): a block of a trace, named by its id
TAIL = 3  # (TAIL, row): tokens of a trace's prompt after its last block
TURN = 4  # (TURN, session, turn): what the user adds to a conversation
REPLY = 5  # (REPLY, session, turn): the output of that turn, as later prompts repeat it
WARM_UP = 6  # (WARM_UP, request): sent before a measurement


@dataclass(frozen=True)
class Sample:
    """One request to send.

    parts: (key, length in tokens) of each run of the prompt, in order.
    output_len: tokens to generate.
    arrival_s: seconds after the start of the run.
    after: index of the sample (earlier in the same list) that must have ended before this one may go; the request is
    then sent `arrival_s` seconds after that end: the next turn of a conversation.
    """

    parts: tuple[Part, ...]
    output_len: int
    arrival_s: float = 0.0
    after: int | None = None

    @property
    def input_len(self) -> int:
        """Prompt tokens."""
        return sum(length for _, length in self.parts)


class TokenSource:
    """Seeded token ids: the same seed and key give the same tokens, in any order of asking, on every machine.

    A key names a run of tokens, such as a trace's block id: equal keys, equal tokens; different keys, different ones.
    Token number i of a run is a hash (SplitMix64: Steele et al., "Fast splittable pseudorandom number generators",
    OOPSLA 2014) of seed, key and i, so that the runs of a prompt are made in one pass. Runs are kept, least recently
    used out first, so that a shared one is made once.
    """

    def __init__(self, seed: int, vocab_size: int, cache_runs: int = 8192) -> None:
        """cache_runs: most runs kept, each of at most LONGEST_CACHED_RUN tokens; a token takes 8 bytes."""
        low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
        self._num_ids = min(MOST_IDS, vocab_size - low)
        # Spread over the vocabulary. Lists of these objects cost 8 bytes a token; new integers would take 32 more.
        ids = [low + i * (vocab_size - low) // self._num_ids for i in range(self._num_ids)]
        self._ids = np.array(ids, dtype=object)
        self._seed = _mixed(seed)
        self._cache_runs = cache_runs
        self._runs: OrderedDict[Key, list[int]] = OrderedDict()

    def take(self, length: int, *key: int) -> list[int]:
        """`length` token ids. A longer run of the same key starts with the shorter one."""
        return self._joined(((key, length),))

    def prompt(self, sample: Sample) -> list[int]:
        """The sample's prompt: `sample.input_len` token ids, in a list of its own."""
        return self._joined(sample.parts)

    def _joined(self, parts: Sequence[Part]) -> list[int]:
        made = self._make([part for part in parts if not self._has(part)])
        tokens: list[int] = []
        for part in parts:
            key, length = part
            run = made.get(part)
            if run is None:
                run = self._runs[key]
                self._runs.move_to_end(key)
            tokens += run if len(run) == length else run[:length]
        self._keep(made)
        return tokens

    def _has(self, part: Part) -> bool:
        run = self._runs.get(part[0])
        return run is not None and len(run) >= part[1]

    def _make(self, parts: Sequence[Part]) -> dict[Part, list[int]]:
        if not parts:
            return {}
        lengths = np.array([length for _, length in parts])
        ends = lengths.cumsum()
        states = np.array([self._state(key) for key, _ in parts], dtype=np.uint64)
        positions = np.arange(1, ends[-1] + 1) - np.repeat(ends - lengths, lengths)
        numbers = _hashed(np.repeat(states, lengths), positions.astype(np.uint64))
        tokens = self._ids.take(((numbers >> _HALF) * np.uint64(self._num_ids) >> _HALF).astype(np.intp)).tolist()
        stops = ends.tolist()
        return {part: tokens[stop - part[1] : stop] for part, stop in zip(parts, stops, strict=True)}

    def _state(self, key: Key) -> int:
        state = self._seed
        for number in key:
            state = _mixed(state ^ number)
        return state

    def _keep(self, made: dict[Part, list[int]]) -> None:
        for (key, length), run in made.items():
            if length <= LONGEST_CACHED_RUN:
                self._runs[key] = run
                self._runs.move_to_end(key)
        while len(self._runs) > self._cache_runs:
            self._runs.popitem(last=False)


def fitting(samples: Sequence[Sample], max_model_len: int | None) -> list[Sample]:
    """Those samples that a model of this length can serve, with `after` renumbered.

    A turn whose predecessor is dropped is dropped too: its prompt would continue something that never ran.
    """
    if max_model_len is None:
        return list(samples)
    kept: list[Sample] = []
    new_index: dict[int, int] = {}
    for index, sample in enumerate(samples):
        if sample.input_len + sample.output_len > max_model_len:
            continue
        if sample.after is not None:
            if sample.after not in new_index:
                continue
            sample = replace(sample, after=new_index[sample.after])
        new_index[index] = len(kept)
        kept.append(sample)
    return kept


_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_HALF = np.uint64(32)


def _mixed(number: int) -> int:
    """One step of SplitMix64: 64 bits of hash of the low 64 bits of `number`."""
    z = (number + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _hashed(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Number `positions` (from 1) of the SplitMix64 streams that start at `states`; changes both arrays."""
    positions *= np.uint64(_GOLDEN)
    z = states
    z += positions
    z ^= z >> np.uint64(30)
    z *= np.uint64(_FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    return z
