"""Reading request bodies: bounded, strict JSON, and errors that name the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from kllm.server.errors import ApiError, ClientDisconnected, bad_request
from kllm.server.workers import Workers

MAX_DEPTH = 96  # nesting of arrays and objects; schemas inside have a lower limit of their own
MAX_MEMBERS = 10_000  # of an object: each that is unknown is an error, and costs some microseconds
TEXT_PER_JSON = 8  # so much JSON is decoded while a byte of text is tokenised

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model], max_bytes: int, workers: Workers) -> Model:
    """The body as `model`. Raises ApiError: 413 when it is too large (found while reading), 415 when it is not
    declared as JSON, 400 for anything else that is wrong with it."""
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"The content type must be application/json, not {media_type[:100]!r}.")
    body = await read_bytes(request, max_bytes)
    return await workers.run(len(body) // TEXT_PER_JSON, parse, body, model)


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")


def parse(body: bytes, model: type[Model]) -> Model:
    """Raises ApiError 400. Of a key that occurs twice the last value counts."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        message, param = describe(error.errors(include_url=False), value)
        raise bad_request(message, param) from None


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN or infinities, no lone surrogates, valid UTF-8, bounded depth and members. Raises ApiError
    400."""
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise bad_request("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {_json_problem(body, error)}.") from None
    check_shape(value)
    return value


def _json_problem(body: bytes, error: msgspec.DecodeError) -> str:
    if not body:
        return "it is empty"
    text = str(error).removeprefix("JSON is malformed: ")
    return text.split(" - at `")[0]


def check_shape(value: Any) -> None:
    """Raises ApiError when arrays and objects nest deeper than MAX_DEPTH, or an object has more than MAX_MEMBERS."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise _too_deep()


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict) and len(node) > MAX_MEMBERS:
        raise bad_request(f"An object may have at most {MAX_MEMBERS} members.")
    items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def _too_deep() -> ApiError:
    return bad_request(f"JSON may be nested at most {MAX_DEPTH} levels deep.")


def describe(errors: list[ErrorDetails], value: dict[str, Any]) -> tuple[str, str | None]:
    """(message, param) of the first field that is wrong. A union reports one error per alternative, under locations
    that are no part of the input: they are left out, and the alternatives that were wrong joined with "or"."""
    paths = [_path(error, value) for error in errors]
    same_field = [path for path in paths if _head(path) == _head(paths[0])]
    param = max(same_field, key=lambda path: path.count(".") + path.count("["))  # the alternative that went deepest
    first = next(error for error, path in zip(errors, paths, strict=True) if path == param)
    if first["type"] == "extra_forbidden":
        return f"Unrecognized request argument: {param}.", param
    if first["type"] == "missing":
        return f"Missing required parameter: {param}.", param
    told = dict.fromkeys(_sentence(error) for error, path in zip(errors, paths, strict=True) if path == param)
    return f"Invalid value for {param}: {' or '.join(told)}." if param else f"{' or '.join(told)}.", param or None


def _head(path: str) -> str:
    return path.split("[")[0].split(".")[0]


def _sentence(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return (message[:1].lower() + message[1:]).rstrip(".")


def _path(error: ErrorDetails, value: Any) -> str:
    """The location as a client would write it: messages[0].content."""
    parts: list[str] = []
    location = error["loc"]
    for i, item in enumerate(location):
        if isinstance(value, dict) and isinstance(item, str) and item in value:
            value = value[item]
        elif isinstance(value, list) and isinstance(item, int) and item < len(value):
            value = value[item]
            parts.append(f"[{item}]")
            continue
        elif not (error["type"] == "missing" and i == len(location) - 1):
            continue
        parts.append(f".{item}" if parts else str(item))
    return "".join(parts)
