"""Tokens of vocabularies in SentencePiece's manner: ▁ stands for a blank, <0xE4> for a byte.

A decoder takes the blank off the start of a text, so that decoding one token alone does not tell its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class PieceDecoder(NamedTuple):
    """What a tokenizer's decoder does to each token, apart from the others. replaced: (what, by what), in order.
    byte_fallback: whether <0xE4> is a byte."""

    replaced: tuple[tuple[str, str], ...]
    byte_fallback: bool

    @classmethod
    def of(cls, backend: Backend) -> PieceDecoder | None:
        """None for other kinds of decoders, byte-level BPE among them."""
        steps = [] if backend.decoder is None else _steps(json.loads(cast(bytes, backend.decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds:
            return None
        replaced = [pair for step in steps if (pair := _replacement(step)) is not None]
        if not replaced and "ByteFallback" not in kinds:
            return None
        return cls(tuple(replaced), "ByteFallback" in kinds)

    def bytes_of(self, piece: str) -> bytes:
        byte = self._byte(piece)
        if byte is not None:
            return byte
        for old, new in self.replaced:
            piece = piece.replace(old, new)
        return piece.encode()

    def marked(self, pieces: Iterable[str]) -> list[str]:
        """Pieces with U+FFFD for each byte that is in no character, as SentencePiece decodes them. The tokenizers
        library marks all bytes in a row when one is wrong: also those of characters that were sent long ago."""
        marked: list[str] = []
        for has_bytes, run in groupby(pieces, key=lambda piece: self._byte(piece) is not None):
            same = list(run)
            marked += _with_marks(b"".join(map(self.bytes_of, same))) if has_bytes else same
        return marked

    def _byte(self, piece: str) -> bytes | None:
        found = _BYTE.fullmatch(piece) if self.byte_fallback else None
        return None if found is None else bytes.fromhex(found[1])


def _with_marks(data: bytes) -> list[str]:
    pieces: list[str] = []
    for char in data.decode(errors="surrogateescape"):  # a surrogate for each byte that is wrong
        wrong = "\udc80" <= char <= "\udcff"
        pieces += [REPLACEMENT] if wrong else [f"<0x{byte:02X}>" for byte in char.encode()]
    return pieces


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None
