"""Around every request: its id, its log line, and the last resort for errors."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kllm.server.errors import ClientDisconnected, log_failure, to_api_error
from kllm.server.jobs import request_id_from
from kllm.server.reply import DIRECT_SEND
from kllm.telemetry.logs import fields

logger = logging.getLogger("kllm.server")

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/load", "/v1/models"})  # polled by machines
CLIENT_GONE = 499  # what the log says of requests whose client left; nobody receives it


class RequestLog:
    """Outermost ASGI layer. Gives the request an id (scope["state"]["request_id"], echoed as X-Request-Id), logs one
    line at its end, and answers for exceptions that nothing below has handled. No traceback leaves the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope[DIRECT_SEND] = send
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            status = CLIENT_GONE
        except Exception as error:
            told = to_api_error(error, request_id)
            if told.status == 500:
                log_failure(logger, error, request_id)
            if status == 0:
                await told.response()(scope, receive, send_with_id)
            else:
                raise  # half a response is out: the server must cut the connection
        finally:
            _log(scope, request_id, status, time.perf_counter() - started)


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    path = scope["path"]
    level = logging.DEBUG if path in QUIET_PATHS and status in (200, 503) else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "%s %s",
            scope["method"],
            path[:200],
            extra=fields(request_id=request_id, status=status, ms=seconds * 1000),
        )
