"""An OpenAI-compatible engine of somebody else: enough HTTP for an adapter, predictable tokens, faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

VOCABULARY = 1000
MODEL = "theirs"
METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{{engine="0",model_name="theirs"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="theirs"}} 3.0
vllm:kv_cache_usage_perc{{engine="0",model_name="theirs"}} 0.25
vllm:cache_config_info{{block_size="4",num_gpu_blocks="500"}} 1.0
"""


def continuation(sequence: Sequence[int], count: int) -> list[int]:
    """Each token depends on all before it, so an attempt goes on as the one before would have."""
    tokens = list(sequence)
    for _ in range(count):
        tokens.append(zlib.crc32(repr(tokens).encode()) % VOCABULARY)
    return tokens[len(sequence) :]


class ForeignEngine:
    """One server on a free loopback port, in the test's own loop.

    faults: what befalls the next completions, one each: a status ("500", "429"), "cut" and "no done" (after two
    tokens), "hang" and "malformed" (after two), "no ids", "deluge" (more than was asked for).
    bodies: of the completions so far; heads: of all requests; left: completions whose client went away.
    """

    def __init__(self, *, port: int = 0, chunk_s: float = 0.0) -> None:
        self.faults: list[str] = []
        self.health = 200
        self.clears: bool | None = True  # its prefix cache, when asked to; None: it knows of no such thing
        self.card: dict[str, Any] = {"id": MODEL, "owned_by": "vllm", "max_model_len": 2000}
        self.metrics: str | None = METRICS
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.left = 0
        self.running = 0
        self.most_running = 0
        self._port = port
        self._chunk_s = chunk_s
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ForeignEngine:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Every connection breaks, and nobody listens any more."""
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = next(
                (int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0
            )
            body = await reader.readexactly(length)
            await self._answer(head.split(" ")[0], head.split(" ")[1], body, reader, writer)
            await writer.drain()
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(
        self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/completions":
            await self._complete(json.loads(body), reader, writer)
        elif path == "/v1/models":
            _respond(writer, 200, json.dumps({"object": "list", "data": [self.card]}))
        elif path == "/health":
            _respond(writer, self.health, "")
        elif path == "/version":
            _respond(writer, 200, '{"version": "9.9"}')
        elif path == "/metrics" and self.metrics is not None:
            _respond(writer, 200, self.metrics.format(running=self.running))
        elif path == "/reset_prefix_cache" and method == "POST" and self.clears is not None:
            _respond(writer, 200, json.dumps({"success": self.clears}))
        else:
            _respond(writer, 404, '{"detail": "Not Found"}')

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else ""
        if fault.isdigit():
            _respond(writer, int(fault), json.dumps({"error": {"message": f"told to answer {fault}"}}))
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = asyncio.create_task(self._stream(body, fault, writer))
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((stream, gone), return_when=asyncio.FIRST_COMPLETED)
            self.left += not stream.done()
        finally:
            self.running -= 1
            stream.cancel()
            gone.cancel()
            await asyncio.gather(stream, gone, return_exceptions=True)

    async def _stream(self, body: dict[str, Any], fault: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        tokens = continuation(body["prompt"], body["max_tokens"] + (5 if fault == "deluge" else 0))
        for index, token in enumerate(tokens):
            if index == 2 and fault == "hang":
                await asyncio.Event().wait()
            if index == 2 and fault == "cut":
                writer.transport.abort()
                return
            if index == 2 and fault == "no done":
                break
            if index == 2 and fault == "malformed":
                _chunk(writer, "data: {nonsense\n\n")
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": None}
            if fault != "no ids" and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if index == len(tokens) - 1:
                choice["finish_reason"] = "length"
            _chunk(writer, f"data: {json.dumps({'choices': [choice]})}\n\n")
            await writer.drain()
            await asyncio.sleep(self._chunk_s)
        else:
            _chunk(writer, f"data: {json.dumps({'choices': [], 'usage': {}})}\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _respond(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    head = f"HTTP/1.1 {status} Because\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write((head + body).encode())


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextlib.asynccontextmanager
async def engines(count: int, **options: Any) -> AsyncIterator[list[ForeignEngine]]:
    """Several of them."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ForeignEngine(**options)) for _ in range(count)]


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Poll until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - whatever it asks has no event
            await asyncio.sleep(0.01)
