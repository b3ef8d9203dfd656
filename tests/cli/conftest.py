"""A small chat server that echoes, slowly if asked to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from support.web_server import served

API_KEY = "secret"


@dataclass
class EchoServer:
    """Answers `echo: QUESTION`; "slow …" streams for ever, "refuse" gets an error, "break" an error midway."""

    url: str = ""
    requests: list[list[dict[str, str]]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)


def _event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n".encode()


async def _answer(server: EchoServer, question: str) -> Any:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
    yield f"data: {json.dumps(role)}\n\n".encode()
    yield _event("echo: ")
    if question.startswith("slow"):
        server.started.set()
        try:
            while True:
                await asyncio.sleep(0.01)
                yield _event("… ")
        finally:
            server.hung_up.set()
    if question == "break":
        yield b'data: {"error": {"message": "the engine broke"}}\n\n'
        return
    yield _event(question)
    yield b"data: [DONE]\n\n"


def _application(server: EchoServer) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return JSONResponse({"error": {"message": "wrong key"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": "echo"}]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        server.bodies.append(body)
        server.requests.append(body["messages"])
        question = body["messages"][-1]["content"]
        if question == "refuse":
            return JSONResponse({"error": {"message": "not today"}}, status_code=400)
        return StreamingResponse(_answer(server, question), media_type="text/event-stream")

    return app


@pytest.fixture
def echo_server() -> Iterator[EchoServer]:
    server = EchoServer()
    with served(_application(server)) as server.url:
        yield server


@pytest.fixture
def api_key() -> str:
    return API_KEY
