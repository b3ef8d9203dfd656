"""Counter-based random numbers: a draw is a function of (seed, position, purpose) and of nothing else."""

from __future__ import annotations

import struct
from enum import IntEnum
from hashlib import blake2b

_KEY = struct.Struct("<QQB")
_MASK64 = 2**64 - 1


class Purpose(IntEnum):
    """What a draw decides. Draws for different purposes at one position are independent."""

    TOKEN = 0


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """A number in [0, 1) with 53 random bits. position: index in the request's sequence of the token drawn."""
    key = _KEY.pack(seed & _MASK64, position, purpose)
    bits = int.from_bytes(blake2b(key, digest_size=8, person=b"kllm.draws").digest(), "little")
    return (bits >> 11) * 2.0**-53
