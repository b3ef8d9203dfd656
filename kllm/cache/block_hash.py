"""Names of KV blocks outside the device: a hash of everything that their contents depend on.

    H(0)   = H128(fingerprint, salt, adapter)                     no tokens yet
    H(i+1) = H128(H(i), tokens of block i)

so the hash of a block names all tokens before it too, and equal hashes mean equal KV. 128 bits of BLAKE2b: nobody can
make two prompts that collide. Tiers, stores and cache events name blocks by it; the prefix tree itself compares tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable

HASH_BYTES = 16


def root_hash(fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
    """fingerprint: identity of model, numerics and page layout (KVSpec.fingerprint)."""
    parts = (part.encode() for part in (fingerprint, salt, adapter))
    return hashlib.blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=16).digest()


def chain(parent: bytes, blocks: Iterable[bytes]) -> list[bytes]:
    """Hashes of the blocks that follow the one named `parent`; each block is the bytes of its tokens (int32, native
    order, as the prefix tree's keys)."""
    hashes = []
    blake2b = hashlib.blake2b
    for block in blocks:
        parent = blake2b(parent + block, digest_size=16).digest()
        hashes.append(parent)
    return hashes


POLITE_BLOCKS = 128  # hashed in a row by chain_politely: about 0.1 ms


def chain_politely(parent: bytes, raw: bytes, width: int) -> list[bytes]:
    """As `chain`, of consecutive blocks of `width` bytes each, for a thread beside the step loop: it offers the
    interpreter lock to others again and again."""
    hashes: list[bytes] = []
    for start in range(0, len(raw), width * POLITE_BLOCKS):
        end = min(len(raw), start + width * POLITE_BLOCKS)
        hashes += chain(parent, (raw[i : i + width] for i in range(start, end, width)))
        parent = hashes[-1]
        time.sleep(0)
    return hashes
