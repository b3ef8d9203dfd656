"""How much of a load's prompts a cache could give: the bound that a cache of any size is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from kllm.workload.sample import Key, Part, Sample


def infinite_cache_hits(samples: Sequence[Sample], block_tokens: int) -> tuple[int, int]:
    """(hit tokens, prompt tokens) of these samples, one after the other, with one cache that forgets nothing.

    Hits are whole blocks from the start of a prompt, all but its last token at most, as in the engine's cache. Outputs
    are not cached: no made-up prompt repeats them. O(runs)."""
    seen = _Prefixes()
    hits = tokens = 0
    for sample in samples:
        length = sample.input_len
        hits += min(seen.take(sample.parts), length - 1) // block_tokens * block_tokens
        tokens += length
    return hits, tokens


class _Prefixes:
    """A tree of prompts. A node is a number, and stands for a sequence of whole runs; 0 is the empty one."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Part], int] = {}
        self._longest: dict[tuple[int, Key], int] = {}  # of the runs of a key that followed a node, in tokens

    def take(self, parts: Sequence[Part]) -> int:
        """Leading tokens that a prompt before had too; from now on this one is among those."""
        node = matched = 0
        matching = True
        for part in parts:
            key, length = part
            longest = self._longest.get((node, key), 0)
            child = self._children.get((node, part))
            if matching:
                matching = child is not None
                matched += min(length, longest)
            if length > longest:
                self._longest[node, key] = length
            if child is None:
                child = self._children[node, part] = len(self._children) + 1
            node = child
        return matched
