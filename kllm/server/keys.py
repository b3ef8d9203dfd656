"""API keys: who may ask, and whose cache it is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from kllm.config import ServerConfig
from kllm.server.errors import ApiError

KeyCheck = Callable[[Request], Awaitable[None]]


def key_check(config: ServerConfig) -> KeyCheck | None:
    """Raises ApiError 401 unless the request carries one of the keys, and where each has a cache of its own tells
    whose it is (the tenant, in request.state). None if there are no keys."""
    if not config.api_key:
        return None
    digests = [_digest(key) for key in set(config.api_key)]
    separate = _separate(config)

    async def check(request: Request) -> None:
        digest = _presented(request)
        if digest is None or not _among(digest, digests):
            raise _wrong_key()
        if separate:
            request.state.tenant = digest.hex()

    return check


def operator_check(config: ServerConfig) -> KeyCheck | None:
    """For what shows or changes the whole server: like key_check, but where there are operators' keys, or clients that
    must not learn of each other, only an operator's key will do (ApiError 403)."""
    if not config.admin_api_key and not _separate(config):
        return key_check(config)
    clients, operators = [_digest(key) for key in config.api_key], [_digest(key) for key in config.admin_api_key]

    async def check(request: Request) -> None:
        digest = _presented(request)
        if digest is not None and _among(digest, operators):
            return
        if digest is None or not _among(digest, clients):
            raise _wrong_key()
        raise ApiError(403, "This needs an operator's key (admin_api_key).", code="operator_key_needed")

    return check


def _separate(config: ServerConfig) -> bool:
    return len(set(config.api_key)) > 1 and not config.share_cache_between_keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _presented(request: Request) -> bytes | None:
    """Of the bearer token."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return hashlib.sha256(key.strip().encode("latin-1")).digest() if scheme.lower() == "bearer" else None


def _among(digest: bytes, known: list[bytes]) -> bool:
    """Compares with all of them, whatever the first comparison says."""
    return sum(hmac.compare_digest(digest, each) for each in known) > 0


def _wrong_key() -> ApiError:
    return ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
