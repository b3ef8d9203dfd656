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
    digests = [hashlib.sha256(key.encode()).digest() for key in set(config.api_key)]
    separate = len(digests) > 1 and not config.share_cache_between_keys

    async def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in digests]  # all of them, whatever the first says
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        if separate:
            request.state.tenant = digest.hex()

    return check
