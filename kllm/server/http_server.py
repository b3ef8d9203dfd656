"""Uvicorn, run by us: our event loop, our socket, our signals, our log."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

IDLE_CONNECTION_S = 75  # longer than common proxies keep theirs, so that they close first
CLOSE_S = 3  # for replies still on their way after everything has ended


class HttpServer(uvicorn.Server):
    """Serves an ASGI app on a listening socket until `stop`. `listening` is set once connections are answered."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals start a drain, which is not uvicorn's business."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop(self) -> None:
        self.should_exit = True
