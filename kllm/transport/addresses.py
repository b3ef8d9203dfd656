"""Addresses that instances listen at: tcp://HOST:PORT or ipc:///PATH; HOST:PORT is short for the former."""

from __future__ import annotations

import ipaddress
import re

_TCP = re.compile(r"(?:tcp://)?(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):(?P<port>[0-9]{1,5}|\*)")
LONGEST_PATH = 100  # bytes; the system allows 107


class AddressError(ValueError):
    """Not an address, or one that must not be used this way; the message says why."""


def normalize(address: str) -> str:
    """The address with its scheme. Raises AddressError."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/") or len(path.encode()) > LONGEST_PATH:
            raise AddressError(f"{address!r}: ipc:// wants an absolute path of at most {LONGEST_PATH} bytes")
        return address
    match = _TCP.fullmatch(address)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise AddressError(f"{address!r} is not an address such as tcp://127.0.0.1:7001 or ipc:///run/kllm/one")
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"]  # ZeroMQ binds no names
    return f"tcp://{host}:{match['port']}"


def stays_here(address: str) -> bool:
    """Whether only this machine reaches a normalized address."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def need_key(address: str, *, has_key: bool) -> None:
    """Raises AddressError for an address that others reach, without a key that keeps them out."""
    if not has_key and not stays_here(address):
        raise AddressError(
            f"{address} can be reached from other machines, and without a key anyone there could use the instance: "
            "give a key file (made with: openssl rand -hex 32 > fleet.key; chmod 600 fleet.key)"
        )
