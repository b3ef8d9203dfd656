"""How a gateway finds an external engine: an entry [[external]] of its configuration."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from kllm.config import Config


def check_url(value: str) -> str:
    """http(s)://HOST[:PORT][/PATH] without a slash or /v1 at its end. Raises ValueError."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is not an address such as http://127.0.0.1:8001")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address must not hold a name or password: use api_key_env")
    if parts.query or parts.fragment:
        raise ValueError(f"{value!r} must end with its path")
    parts.port  # noqa: B018 - raises ValueError for a port that is none
    return value.rstrip("/").removesuffix("/v1").rstrip("/")


def check_endpoint(value: str) -> str:
    """A ZeroMQ endpoint to connect to. Raises ValueError."""
    scheme, _, place = value.partition("://")
    whole = scheme == "ipc" or (scheme == "tcp" and urlsplit(value).port is not None)
    if not whole or not place or "*" in place:
        raise ValueError(f"{value!r} is not an endpoint to connect to, such as tcp://127.0.0.1:5557")
    return value


Endpoint = Annotated[str, AfterValidator(check_endpoint)]


class ExternalEngine(Config):
    """A running engine with an OpenAI-compatible API whose completions carry token ids, such as vLLM's."""

    url: Annotated[str, AfterValidator(check_url)] = Field(description="Its address, such as http://127.0.0.1:8001.")
    model: str | None = Field(None, description="The model's name there; the first of its /v1/models if left out.")
    api_key_env: str | None = Field(None, description="Environment variable that holds its API key.")
    kv_events: Endpoint | None = Field(None, description="Where it publishes its KV events.")
    replay: Endpoint | None = Field(None, description="Where it repeats KV events that were lost.")
    kv_topic: str = Field("", description="Topic of its KV events.")
    block_size: int | None = Field(
        None, ge=1, le=65536, description="Tokens of a block of its KV cache; asked of its /metrics if left out."
    )
    max_model_len: int | None = Field(None, ge=2, description="Its longest sequence; asked of its /v1/models first.")
    max_requests: int = Field(256, ge=1, le=65536, description="Most requests sent to it at once; others wait here.")
    read_timeout: float = Field(
        120.0, gt=0, description="Seconds that it may send nothing for a request before another attempt is made."
    )
