"""A small server that streams completions the way OpenAI's API does, with failures on request."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from support.web_server import served

TOKEN_S = 0.002


@dataclass
class TokenServer:
    """Answers every prompt with `max_tokens` words. The first token id of a prompt chooses a failure (see FAILURES)."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


WITHOUT_USAGE = 5
FAILURES = {1: "http 429", 2: "stream cut off", 3: "error in stream", 4: "bad chunk"}


def _chunk(**fields: Any) -> bytes:
    return f"data: {json.dumps({'id': 'x', 'object': 'text_completion', **fields})}\n\n".encode()


async def _stream(server: TokenServer, body: dict[str, Any]) -> Any:
    prompt, count = body["prompt"], body["max_tokens"]
    server.running += 1
    server.most_running = max(server.most_running, server.running)
    try:
        for index in range(count):
            await asyncio.sleep(TOKEN_S)
            last = index == count - 1
            yield _chunk(choices=[{"index": 0, "text": f"t{index} ", "finish_reason": "length" if last else None}])
            if prompt[0] == 2:
                return
            if prompt[0] == 3:
                yield _chunk(error={"message": "broken", "type": "server_error"})
                return
            if prompt[0] == 4:
                yield b"data: {not json\n\n"
                return
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        if prompt[0] != WITHOUT_USAGE:
            yield _chunk(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 3}})
        yield b"data: [DONE]\n\n"
    finally:
        server.running -= 1


def _application(server: TokenServer) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "words", "object": "model", "max_model_len": 1000}]})

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        server.bodies.append(body)
        if body["prompt"][0] == 1:
            return JSONResponse({"error": {"message": "queue is full"}}, status_code=429)
        return StreamingResponse(_stream(server, body), media_type="text/event-stream")

    return app


@pytest.fixture
def token_server() -> Iterator[TokenServer]:
    server = TokenServer()
    with served(_application(server)) as server.url:
        yield server


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that nobody listens on: it is bound, so nobody else gets it, but not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
