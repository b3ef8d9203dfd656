"""Words that must not appear, as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Iterable

from kllm.tokenization.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The usual spellings of each word: as given, and with a blank before it as inside a sentence."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                spellings[ids] = None
    return tuple(spellings)
