"""DirectCalls: the busiest endpoints without FastAPI's routing and injection, which would be a fifth of their cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from kllm.server.keys import KeyCheck

Endpoint = Callable[[Request], Awaitable[Response]]


def endpoints(router: APIRouter) -> dict[str, Endpoint]:
    """By path, of a router whose endpoints all take POST and nothing but the request."""
    return {route.path: route.endpoint for route in router.routes if isinstance(route, APIRoute)}


class DirectCalls:
    """ASGI layer. A POST to one of the paths is answered by its endpoint, after the check of its key; all else, other
    methods included, goes on to `app`, where the same endpoints are described. What they raise is the affair of the
    layer around this one."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint], check: KeyCheck | None) -> None:
        self._app = app
        self._endpoints = endpoints
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        if self._check is not None:
            await self._check(request)
        response = await endpoint(request)
        await response(scope, receive, send)
