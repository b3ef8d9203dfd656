"""The least that could answer: what the client and the network take when nothing is in between.

    python -m benchmarks.gateway.bare_server STEP_S TOKENS

Prints its port. Every request gets an event at once and one at every step, of the size that the real server's have,
whatever it asks for.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import cast

import uvloop

from benchmarks.gateway.mock_instance import Metronome

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: " + b'{"text":" token"}'.ljust(240) + b"\n\n"
LAST = b'data: {"finish_reason":"length"}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answering(asyncio.Protocol):
    def __init__(self, running: dict[Answering, int], tokens: int) -> None:
        self._running = running
        self._tokens = tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        head, found, body = data.partition(b"\r\n\r\n")
        if found and head.startswith(b"POST"):
            self._missing = int(head.rpartition(b"Content-Length: ")[2].split(b"\r\n")[0]) - len(body)
        else:
            self._missing -= len(data)
        if self._missing == 0:
            self._transport.write(HEAD + chunk(EVENT))
            self._running[self] = self._tokens - 1

    def step(self) -> None:
        self._running[self] -= 1
        if self._running[self]:
            self._transport.write(chunk(EVENT))
        else:
            del self._running[self]
            self._transport.write(chunk(EVENT + LAST) + b"0\r\n\r\n")


async def main(step_s: float, tokens: int) -> None:
    running: dict[Answering, int] = {}

    def step() -> None:
        for each in list(running):
            each.step()

    server = await asyncio.get_running_loop().create_server(lambda: Answering(running, tokens), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    Metronome(step_s, 0.0, step)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started this closes it


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), int(sys.argv[2])))
    os._exit(0)
