"""PrefixHits: how much of the prompts was found in the cache, and in which tier. Pure."""

from __future__ import annotations

from kllm.scheduling.sequence import Sequence


class PrefixHits:
    """queries, tokens: of prompts when they were admitted, and what the cache had of them in any tier. l2, l3: tokens
    of these that were brought from there. wasted: blocks brought and gone again when their request was admitted."""

    def __init__(self, block_tokens: int) -> None:
        self.queries = self.tokens = self.l2 = self.l3 = self.wasted = 0
        self._block_tokens = block_tokens

    def admitted(self, sequence: Sequence, matched: int) -> None:
        """With so many tokens from the cache. What is handed over was counted where it was computed."""
        if sequence.kv is None:
            self.queries += len(sequence.tokens)
            self.tokens += matched
            self._credit_tiers(sequence, matched)

    def turned_back(self, sequence: Sequence, matched: int) -> None:
        """It is looked up once more, since what was brought for it is gone."""
        self.wasted += self._gone(sequence, matched)

    def _gone(self, sequence: Sequence, matched: int) -> int:
        """Blocks that were brought for it and are not there any more: what was brought last goes first."""
        before, l2, l3 = sequence.brought
        return min(max(0, before + l2 + l3 - matched // self._block_tokens), l2 + l3)

    def _credit_tiers(self, sequence: Sequence, matched: int) -> None:
        """Say which tier the hit came from: what was brought last ends the match, if it is still there."""
        _, l2, l3 = sequence.brought
        if l2 + l3 == 0:
            return
        gone = self._gone(sequence, matched)
        self.wasted += gone
        kept = l2 + l3 - gone
        from_store = round(kept * l3 / (l2 + l3))
        self.l3 += from_store * self._block_tokens
        self.l2 += (kept - from_store) * self._block_tokens
