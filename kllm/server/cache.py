"""Flushing the caches: vLLM's /reset_prefix_cache and SGLang's /flush_cache."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from kllm.server import openapi
from kllm.server.errors import bad_request, json_response
from kllm.server.responses import CacheClearedResponse
from kllm.server.service import Service

_FLAGS = {
    "reset_external": "Clear the store (L3) too, for all instances and servers that use it.",
    "reset_running_requests": "Only false: prefixes that requests are using stay until these have ended.",
}
_VALUES = {"true": True, "1": True, "false": False, "0": False}


def cache_routes(service: Service) -> APIRouter:
    router = APIRouter()
    answers: dict[str, Any] = {"response_model": CacheClearedResponse, "responses": openapi.errors(400, 401, 403, 503)}

    @router.post(
        "/reset_prefix_cache",
        summary="Forget all cached prefixes that no request uses, on the device and in host memory.",
        openapi_extra={"parameters": [_parameter(name, text) for name, text in _FLAGS.items()]},
        **answers,
    )
    async def reset_prefix_cache(request: Request) -> Response:
        flags = _flags(request, list(_FLAGS))
        if flags["reset_running_requests"]:
            raise bad_request("Running requests are not interrupted for it.", "reset_running_requests")
        return await _clear(service, store=flags["reset_external"])

    @router.post("/flush_cache", summary="The same as /reset_prefix_cache without options.", **answers)
    async def flush_cache(request: Request) -> Response:
        _flags(request, [])
        return await _clear(service, store=False)

    return router


async def _clear(service: Service, store: bool) -> Response:
    service.require_ready()
    instances = await service.gateway.clear_cache(store)
    complete = all(instance.complete for instance in instances)
    return json_response({"complete": complete, "instances": [msgspec.structs.asdict(each) for each in instances]})


def _parameter(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": "boolean", "default": False}}


def _flags(request: Request, names: list[str]) -> dict[str, bool]:
    """The query's values. Raises ApiError 400 for others than these, so that a misspelt one is noticed."""
    flags = dict.fromkeys(names, False)
    for name, text in request.query_params.multi_items():
        value = _VALUES.get(text.lower())
        if name not in flags:
            raise bad_request(f"Unknown query parameter: {name[:200]}.", name[:200])
        if value is None:
            raise bad_request(f"{name} must be true or false.", name)
        flags[name] = value
    return flags
