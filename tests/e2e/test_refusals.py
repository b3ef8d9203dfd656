"""Requests that a running server refuses: at once, with the right status, streaming or not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.live_server import CHAT, TEXT, LiveServer

HI = [{"role": "user", "content": "hi"}]
NOTHING = r"[^\x00-\U0010FFFF]"  # looks right, and only the instance finds that no token can begin it


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


REFUSED: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "longer than the context": (TEXT, {"prompt": "ab " * 2200}, "context of 4096", "context_length_exceeded"),
    "a chat longer than the context": (
        CHAT, {"messages": [{"role": "user", "content": "ab " * 2200}]}, "context of 4096", "context_length_exceeded",
    ),
    "characters beyond any tokens": (TEXT, {"prompt": "a" * 100_000}, "context of 4096", "context_length_exceeded"),
    "more output than the context": (TEXT, {"max_tokens": 4096}, "context is 4096", "context_length_exceeded"),
    "more than the KV cache": (TEXT, {"max_tokens": 3900}, "KV blocks, but the cache has 200", None),
    "a prompt larger than the KV cache": (TEXT, {"prompt": [5] * 3500}, "KV cache holds 3200", None),
    "a broken regex": (TEXT, {"structured_outputs": {"regex": "(a"}}, "unclosed group", None),
    "a regex that matches nothing": (TEXT, {"structured_outputs": {"regex": NOTHING}}, "nothing can match it", None),
    "a grammar with unknown tokens": (
        TEXT, {"structured_outputs": {"grammar": "start: <|nothing|>"}}, "unknown special token", None,
    ),
    "a broken schema": (CHAT, {"messages": HI, **schema({"type": "rainbow"})}, "rainbow", None),
    "a schema nothing fits": (
        CHAT, {"messages": HI, **schema({"type": "string", "minLength": 5, "maxLength": 3})}, "Unsatisfiable", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_400(live_server: LiveServer, name: str, stream: bool, n: int) -> None:
    path, body, says, code = REFUSED[name]
    body = {**({"prompt": "hi"} if path == TEXT else {}), **body, "stream": stream, "n": n}
    with live_server.client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert says in error["message"]
        assert client.get("/load").json()["server_load"] == 0


def test_key(live_server: LiveServer) -> None:
    for key in ("", "Bearer wrong", f"Basic {live_server.api_key}"):
        response = httpx.post(f"{live_server.url}{TEXT}", json={"prompt": "a"}, headers={"Authorization": key})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{live_server.url}/health").status_code == 200


def test_body_limit(live_server: LiveServer) -> None:
    with live_server.client() as client:
        response = client.post(TEXT, json={"prompt": "a" * 250_000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_full_queue(live_server: LiveServer) -> None:
    """The queue holds 24 requests; those in it are not disturbed by the one that is refused."""
    body = {"prompt": "fill", "n": 24, "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    with live_server.stream(TEXT, body) as reader, live_server.client() as client:
        reader.read_tokens(1)
        for stream in (False, True):
            refused = client.post(TEXT, json={"prompt": "one more", "stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        reader.read_all()
        assert [len(output.token_ids) for output in reader.outputs.values()] == [100] * 24
        assert client.post(TEXT, json={"prompt": "one more"}).status_code == 200
        assert client.post(TEXT, json={"prompt": "more than it ever holds", "n": 25}).status_code == 400
    live_server.wait_idle()
