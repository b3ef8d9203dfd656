"""A load generator that does little per event, so that two cores are enough for it and for what it measures.

Requests are whole HTTP messages made beforehand; an answer is looked at when its first event comes and when it is
whole.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

END_OF_BODY = b"0\r\n\r\n"
EVENT = b"data: "
STREAMED = b"chunked"  # in the head


@dataclass(slots=True)
class Answer:
    """Times in seconds of the machine's monotonic clock. due: when the request should have been sent.

    arrivals: of the pieces of a stream, the first with its first event. end: of the answer."""

    due: float
    sent: float
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    def problem(self, tokens: int) -> str | None:
        """What is wrong with it, if not all tokens came."""
        data = b"".join(self.body)
        if not data.startswith(b"HTTP/1.1 200"):
            return data[:300].decode(errors="replace")
        events = data.count(EVENT)
        if not (2 <= events <= tokens + 2 and b'"finish_reason":"length"' in data and b"data: [DONE]" in data):
            return f"{events} events for {tokens} tokens: {data[-300:].decode(errors='replace')}"
        return None


class Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request on it."""

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self._streamed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def send(self, message: bytes, due: float) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._answer = Answer(due, time.monotonic())
        self._transport.write(message)
        return self._done

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if not answer.body:
            self._streamed = STREAMED in data
        answer.body.append(data)
        if answer.arrivals or EVENT in data:
            answer.arrivals.append(time.monotonic())
        if self._is_whole(answer, data):
            self._end(answer)

    def _is_whole(self, answer: Answer, last: bytes) -> bool:
        if self._streamed and len(last) >= len(END_OF_BODY):
            return last.endswith(END_OF_BODY)
        data = b"".join(answer.body)
        if self._streamed:
            return data.endswith(END_OF_BODY)
        head, _, body = data.partition(b"\r\n\r\n")
        return len(body) == int(head.lower().rpartition(b"content-length: ")[2].split(b"\r\n")[0])

    def _end(self, answer: Answer) -> None:
        done, self._answer, self._done = self._done, None, None
        answer.end = time.monotonic()
        self._idle.append(self)
        if done is not None and not done.done():
            done.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Client:
    """Sends requests to one address. `close` when done."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []
        self._all: list[Connection] = []

    async def connect(self, number: int) -> None:
        """Open connections beforehand."""
        for _ in range(number):
            self._idle.append(await self._open())

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._idle), self._host, self._port)
        self._all.append(connection)
        return connection

    async def fetch(self, message: bytes, due: float) -> Answer:
        connection = self._idle.pop() if self._idle else await self._open()
        return await connection.send(message, due)

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    async def poisson(
        self, messages: Sequence[bytes], rate: float, seconds: float, rng: random.Random
    ) -> list[Answer | BaseException]:
        """Answers to requests that arrive independently of each other and of the answers, in order of arrival."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Answer]] = []
        ended = loop.create_future()
        start = time.monotonic()
        offset = loop.time() - start
        dues: list[float] = []
        due = start
        while (due := due + rng.expovariate(rate)) < start + seconds:
            dues.append(due)

        def send(index: int) -> None:
            tasks.append(loop.create_task(self.fetch(messages[index % len(messages)], dues[index])))
            if index + 1 < len(dues):
                loop.call_at(dues[index + 1] + offset, send, index + 1)
            else:
                ended.set_result(None)

        loop.call_at(dues[0] + offset, send, 0)
        await ended
        return list(await asyncio.gather(*tasks, return_exceptions=True))


def completion(host: str, port: int, model: str, prompt: str | list[int], tokens: int) -> bytes:
    """A streaming /v1/completions as it goes over the wire."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _post("/v1/completions", host, port, body)


def chat(host: str, port: int, model: str, prompt: str, tokens: int) -> bytes:
    """A streaming /v1/chat/completions."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _post("/v1/chat/completions", host, port, body)


def _post(path: str, host: str, port: int, body: object) -> bytes:
    data = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: gateway-overhead\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def health(host: str, port: int) -> bytes:
    return f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
