"""Token ids to text, token by token: no half characters, no leaked stop strings.

    ids ──► DecodeWindow ──► segment of text ──► StopFinder ──► released text
            holds bytes that are not             holds text that may be the
            yet a whole character                start of a stop string

Both work one token at a time, so that a push of k tokens gives exactly what k pushes of one token give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kllm.request import SamplingParams
from kllm.tokenization.sentencepiece import REPLACEMENT
from kllm.tokenization.tokenizer import Tokenizer

CONTEXT_TOKENS = 6  # tokens of the prompt that decoding starts from: spaces and marks depend on what is before them
WINDOW_TOKENS = 16  # a window longer than this is cut at the last place where the text was whole
MAX_CHARACTER_TOKENS = 4  # UTF-8 has at most four bytes, and every token at least one


class TextDelta(NamedTuple):
    """What a push adds. num_tokens_kept: how many of the pushed ids belong to the output, up to and including the
    one that completed a stop string. stop: the stop string that ended the output, else None."""

    text: str
    num_tokens_kept: int
    stop: str | None = None


class DecodeWindow:
    """Decodes a growing sequence through a short window of its last tokens.

    window:  [ t0 t1 ... tc | tc+1 ... tn ]     `shown`: the text of the window that was already returned
                           cut                  `cut`: where the text was last whole; the window may start there

    Text that ends in U+FFFD may be a character whose bytes have not all come: it waits. The result is that of
    decoding everything at once, for decoders that map tokens to bytes (byte-level BPE, byte fallback).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [t for t in prompt_token_ids[-CONTEXT_TOKENS:] if t not in self._skipped]
        self._shown = self._decode()
        self._cut = len(self._window)
        self._held = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False) if self._window else ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT):
            self._held += 1
            return self._give_up(text) if self._held > WINDOW_TOKENS else ""
        added = self._after_shown(text)
        self._shown = text
        self._held = 0
        if len(self._window) > WINDOW_TOKENS:
            self._window = self._window[self._cut :]
            self._shown = self._decode()
        self._cut = len(self._window)
        return added

    def flush(self) -> str:
        """The rest, incomplete bytes as U+FFFD."""
        text = self._decode()
        added = self._after_shown(text)
        self._shown = text
        return added

    def _give_up(self, text: str) -> str:
        """So many tokens without a whole character are not UTF-8: release all but the last marks, which may still be
        the beginning of one (byte fallback has a mark for each byte, byte-level BPE one for all of them). Without
        this, every further token would decode an ever longer window."""
        added = self._after_shown(text)
        self._window = self._window[-MAX_CHARACTER_TOKENS:]
        rest = self._decode()
        kept = min(_trailing_marks(added), _trailing_marks(rest), MAX_CHARACTER_TOKENS - 1)
        self._shown = rest[: len(rest) - kept]
        self._cut = self._held = 0
        return added[: len(added) - kept]

    def _after_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # The context ended inside a character that is complete now.
        shown = self._shown.rstrip(REPLACEMENT)
        return text[len(shown) :] if text.startswith(shown) else ""


def _trailing_marks(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))


class StopFinder:
    """Finds the stop string that completes first, and holds back text that may become one.

    Among stop strings that end at the same character the longest wins.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._tail = ""  # the longest end of the text that begins a stop string

    def push(self, segment: str, armed: bool) -> tuple[str, str | None]:
        """(text to release, stop string found). Only a stop string that ends in this segment counts, and only
        when armed. After one is found the finder is done."""
        if not self._stops:
            return segment, None
        text = self._tail + segment
        found = self._find(text, len(self._tail)) if armed and segment else None
        already = len(self._tail) if self._include else 0
        if found is not None:
            end, stop = found
            return text[already : end if self._include else end - len(stop)], stop
        self._tail = text[self._tail_start(text) :]
        return text[already : len(text) if self._include else len(text) - len(self._tail)], None

    def flush(self) -> str:
        """What was held back, when no stop string came of it."""
        tail, self._tail = self._tail, ""
        return "" if self._include else tail

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, old - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = (end, stop)
        return best

    def _tail_start(self, text: str) -> int:
        start = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), start)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, start)
            if at >= 0:
                start = at
        return start


class Detokenizer:
    """Text of one request's output, pushed as it is sampled.

    The joined text of all pushes is the decoded output, cut at the stop string that completes first. A stop string
    counts only when a token after the first `min_tokens` completes it. Not decoded at all when params.detokenize is
    false: stop strings then have no effect.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._enabled = params.detokenize
        self._hide_stop_token = not params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._window = DecodeWindow(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopFinder(params.stop, params.include_stop_str_in_output)
        self._num_tokens = 0
        self.stop: str | None = None

    def push(self, token_ids: Sequence[int], finished: bool = False, stop_token: bool = False) -> TextDelta:
        """Add sampled tokens. finished: no more will come, so nothing is held back any longer.
        stop_token: the last of them is the EOS or stop token that ended the output; it counts as a token but has no
        text unless include_stop_str_in_output. Nothing may be pushed after `finished` or after a stop string."""
        if not self._enabled:
            self._num_tokens += len(token_ids)
            return TextDelta("", len(token_ids))
        pieces: list[str] = []
        shown = len(token_ids) - 1 if stop_token and self._hide_stop_token else len(token_ids)
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if i < shown and self._release(self._window.push(token_id), pieces):
                return TextDelta("".join(pieces), i + 1, self.stop)
        if finished and not self._release(self._window.flush(), pieces):
            pieces.append(self._stops.flush())
        return TextDelta("".join(pieces), len(token_ids), self.stop)

    def _release(self, segment: str, pieces: list[str]) -> bool:
        """Pass a segment through the stop finder; true when a stop string is complete."""
        text, self.stop = self._stops.push(segment, armed=self._num_tokens > self._min_tokens)
        pieces.append(text)
        return self.stop is not None
