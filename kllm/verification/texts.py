"""English text that is on every machine: the help topics that ship with Python."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import chain
from pydoc_data.topics import topics

from kllm.tokenization.tokenizer import Tokenizer

SOURCE = f"pydoc_data.topics of Python {platform.python_version()}"  # the text changes a little between versions


def corpus() -> str:
    """The topics in alphabetical order: about 460,000 characters, 110,000 tokens."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(text: str, tokenizer: Tokenizer, tokens: int, window: int) -> list[list[int]]:
    """The first `tokens` tokens of text in prompts of `window`, each with what the tokenizer puts before a text.

    A rest shorter than a window is left out, unless it is all there is. Raises ValueError if text is too short."""
    start = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, but {tokens} are wanted")
    window = min(window, tokens)
    size = window - len(start)
    return [start + ids[at : at + size] for at in range(0, tokens // window * size, size)]


def flatten(rows: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(rows))
