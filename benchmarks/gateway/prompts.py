"""Prompts of a given number of tokens, from the text of this project's documentation."""

from __future__ import annotations

import random
from pathlib import Path

from kllm.tokenization.tokenizer import Tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"


def prompts(tokenizer: Tokenizer, number: int, tokens: int, rng: random.Random) -> list[list[int]]:
    """Random passages as token ids."""
    ids = tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))), False)
    starts = [rng.randrange(len(ids) - tokens) for _ in range(number)]
    return [ids[start : start + tokens] for start in starts]


def texts(tokenizer: Tokenizer, passages: list[list[int]]) -> list[str]:
    """The passages as text; tokenising one again gives as many tokens, up to one or two."""
    return [tokenizer.decode(ids) for ids in passages]
