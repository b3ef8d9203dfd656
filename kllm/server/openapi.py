"""/openapi.json: request and response schemas of endpoints that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RoleRequest,
    TokenizeRequest,
)
from kllm.server.responses import ChatCompletionChunk, ErrorResponse

_REF = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    RoleRequest,
    ChatCompletionChunk,
)

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "This needs an operator's key.",
    404: "What the request names does not exist.",
    413: "The request body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests are in flight; see Retry-After.",
    500: "The server failed; the message names the request.",
    503: "The model is not ready, or the server is shutting down; see Retry-After.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these errors."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a body of this model."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streams(reply: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The successful response of a route that answers with JSON or, if asked to stream, with events."""
    return {
        200: {
            "model": reply,
            "description": "The completion. With `stream`, server-sent events: the data of each is a "
            f"{chunk.__name__} or, if generation fails, an ErrorResponse; the data of the last is [DONE].",
            "content": {"text/event-stream": {}},
        }
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        _drop_validation_errors(document)
        app.openapi_schema = document
    return app.openapi_schema


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI documents a 422 of its own for every parameter; ours are text and cannot be wrong."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
