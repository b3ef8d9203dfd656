"""Endpoints that are called directly answer as they do by way of FastAPI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message

from kllm.config import ServerConfig
from kllm.server.direct import DirectCalls, endpoints
from kllm.server.errors import ApiError
from kllm.server.keys import key_check


def app() -> tuple[FastAPI, dict[str, Any]]:
    router = APIRouter()

    @router.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(
            b"echo: " + await request.body(), headers={"X-Tenant": getattr(request.state, "tenant", "none")}
        )

    application = FastAPI()
    application.include_router(router)
    return application, endpoints(router)


def call(asgi: Any, method: str, path: str, body: bytes = b"", key: str | None = None) -> tuple[int, bytes, dict]:
    """(status, body, headers)"""
    sent: list[Message] = []
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "state": {}}

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(asgi(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent), dict(sent[0]["headers"])


@pytest.mark.parametrize(("method", "path"), [("POST", "/echo"), ("GET", "/echo"), ("POST", "/other"), ("POST", "/")])
def test_the_answers_are_those_of_the_app(method: str, path: str) -> None:
    application, direct = app()
    assert call(DirectCalls(application, direct, None), method, path, b"hi") == call(application, method, path, b"hi")


def test_keys_are_checked() -> None:
    application, direct = app()
    asgi = DirectCalls(application, direct, key_check(ServerConfig(api_key=["a", "b"])))
    with pytest.raises(ApiError, match="API key"):
        call(asgi, "POST", "/echo")
    with pytest.raises(ApiError, match="API key"):
        call(asgi, "POST", "/echo", key="c")
    tenants = {call(asgi, "POST", "/echo", key=key)[2][b"x-tenant"] for key in ("a", "b")}
    assert len(tenants) == 2
    assert b"none" not in tenants
