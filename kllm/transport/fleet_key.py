"""FleetKey: one secret that all instances and gateways of a fleet share, as the keys of ZeroMQ's CURVE.

The file holds 64 hexadecimal digits. From them come two key pairs, one that instances prove themselves with and one for
gateways; an instance lets in nobody else, and a gateway believes nobody else. Everything between them is encrypted.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85


class KeyFileError(ValueError):
    """The key file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """In Z85, 40 characters each."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class FleetKey:
    instance: KeyPair
    gateway: KeyPair


def read_key(path: Path) -> FleetKey:
    """Raises KeyFileError: it cannot be read, others can read it, or it holds no key."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            text = file.read(1024).decode("ascii", "replace").strip()
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise KeyFileError(f"the key file {path} can be read by others: chmod 600 {path}")
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise KeyFileError(f"the key file {path} must hold 64 hexadecimal digits: openssl rand -hex 32 > {path}")
    return key_from(bytes.fromhex(text))


def key_from(secret: bytes) -> FleetKey:
    """secret: 32 random bytes. Raises KeyFileError where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise KeyFileError("a key needs a ZeroMQ with CURVE (libsodium), which this one is not")
    return FleetKey(_pair(secret, b"kllm instance"), _pair(secret, b"kllm gateway"))


def _pair(secret: bytes, purpose: bytes) -> KeyPair:
    own = z85.encode(hashlib.blake2b(purpose, key=secret, digest_size=32).digest())
    return KeyPair(zmq.curve_public(own), own)
