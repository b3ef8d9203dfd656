"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi.responses import Response

from kllm.cluster.admission import QueueFull, Unavailable
from kllm.request import InvalidRequest
from kllm.telemetry.logs import fields


class ApiError(Exception):
    """What a client is told: an HTTP status and the four fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


class GenerationFailed(Exception):
    """A request that was accepted ended without a result; `reason` is for the log, not for the client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: float | None = 5.0, code: str = "unavailable") -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


def internal_error(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"The server had an error while processing the request. Its id is {request_id}.",
        type="server_error",
        code="internal_error",
    )


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """The client's view of any exception; what it does not know becomes a 500 that says only the request id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return bad_request(error.message, error.param, error.code)
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            str(error),
            type="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, Unavailable):
        return unavailable(str(error), error.retry_after_s)
    return internal_error(request_id)


def log_failure(logger: logging.Logger, error: Exception, request_id: str) -> None:
    """What the client is not told. Failures that the instance reported are no errors of this code: no traceback."""
    trace = None if isinstance(error, GenerationFailed) else error
    logger.error("request failed", exc_info=trace, extra=fields(request_id=request_id, error=error))


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
