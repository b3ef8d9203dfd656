"""Clients that go away: what they asked for is given up, whenever they leave."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest
from support.live_server import TEXT, LiveServer, wait_until


def send(server: LiveServer, body: dict[str, object]) -> socket.socket:
    """The connection of a client that has just asked."""
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {server.api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["at once", "while it waits", "while it reads"])
def test_blocks_are_freed(live_server: LiveServer, when: str, n: int) -> None:
    live_server.wait_idle()
    before = live_server.metrics()
    body = {"prompt": "never heard", "max_tokens": 1000, "ignore_eos": True, "n": n, "stream": when == "while it reads"}
    with send(live_server, body) as connection:
        if when == "while it waits":
            start = before["kllm:generation_tokens_total"]
            wait_until(lambda: live_server.generated() > start, "the request runs")
        if when == "while it reads":
            received = b""
            while b"data: " not in received:
                received += connection.recv(4096)
    aborted = before["kllm:request_success_total:abort"] + n
    wait_until(lambda: live_server.metrics()["kllm:request_success_total:abort"] == aborted, "it is given up")
    live_server.wait_idle()
    after = live_server.metrics()
    assert after["kllm:request_success_total:length"] == before["kllm:request_success_total:length"]
    assert after["kllm:generation_tokens_total"] < before["kllm:generation_tokens_total"] + 1000 * n


def test_half_a_request(live_server: LiveServer) -> None:
    """A client that leaves in the middle of its body costs nothing."""
    address = urlsplit(live_server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {live_server.api_key}\r\n"
        connection.sendall(head.encode() + b'Content-Length: 1000\r\n\r\n{"prompt": "')
    live_server.wait_idle()
    assert "Traceback" not in live_server.log
    assert live_server.complete({"prompt": "still here", "max_tokens": 2}).usage is not None
