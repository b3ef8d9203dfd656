"""DecisionLog: everything that was decided in a run, as a hash that two runs can compare, and as lines on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TextIO

import msgspec

_HASH_EVERY = 1 << 16  # bytes gathered before they are hashed: hashing small pieces costs more than the hash itself


class DecisionLog:
    """note(): one decision. The order of notes is part of the hash, and so is simulated time to the last bit.

    file: gets one JSON line per decision, for reading and for finding where two runs part.
    """

    def __init__(self, clock: Callable[[], float], file: TextIO | None = None) -> None:
        self.entries = 0
        self._clock = clock
        self._file = file
        self._hash = hashlib.blake2b(digest_size=16)
        self._gathered = bytearray()
        self._encode = msgspec.msgpack.Encoder().encode

    def note(self, kind: str, *what: object) -> None:
        """what: numbers, strings, and lists or plain structs of them."""
        entry = (self._clock(), kind, what)
        self.entries += 1
        self._gathered += self._encode(entry)
        if len(self._gathered) >= _HASH_EVERY:
            self._hash_gathered()
        if self._file is not None:
            self._file.write(msgspec.json.encode(entry).decode() + "\n")

    def _hash_gathered(self) -> None:
        self._hash.update(self._gathered)
        self._gathered.clear()

    def digest(self) -> str:
        """Hash of all entries so far."""
        self._hash_gathered()
        return self._hash.hexdigest()
