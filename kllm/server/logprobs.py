"""Log-probabilities in the three forms of the API: chat, legacy completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kllm.request import TokenLogprobs
from kllm.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


class TokenTexts:
    """How single tokens are shown. One instance per server: texts are remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(tokenizer.token_text)
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def _bytes(self, token_id: int) -> list[int]:
        """The token's own bytes, also where they are only a part of a character."""
        return list(self._tokenizer.token_bytes(token_id))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs], limit: int) -> dict[str, Any]:
    """OpenAI's chat form with `limit` alternatives per token."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": texts.bytes(token_id)}

    return {
        "content": [
            shown(entry.token_id, entry.logprob)
            | {"top_logprobs": [shown(token, logprob) for token, logprob in entry.top[:limit]]}
            for entry in entries
        ]
    }


def completion_logprobs(
    texts: TokenTexts, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], limit: int, offset: int
) -> dict[str, Any]:
    """OpenAI's legacy form. An entry of None (the first prompt token) has no log-probability.
    offset: where the text of the first token starts in the choice's text."""
    tokens = [texts.text(token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(texts, entry, limit) for entry in entries],
        "text_offset": offsets,
    }


def _top(texts: TokenTexts, entry: TokenLogprobs, limit: int) -> dict[str, float]:
    """The best tokens and the sampled one. Where two tokens look alike the better one is told."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top[:limit], (entry.token_id, entry.logprob)):
        found.setdefault(texts.text(token), _finite(logprob))
    return found


def prompt_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token a map of token id to logprob, rank and text; null for the first token."""
    return [None if entry is None else _ranked(texts, entry) for entry in entries]


def _ranked(texts: TokenTexts, entry: TokenLogprobs) -> dict[str, Any]:
    found = {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
        for rank, (token, logprob) in enumerate(entry.top, 1)
    }
    found.setdefault(
        str(entry.token_id),
        {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": texts.text(entry.token_id)},
    )
    return found
