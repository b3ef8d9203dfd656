"""What `--kv-events-config` says: whether, where and in which format cache events are published."""

from __future__ import annotations

import json
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

_TCP = re.compile(r"(tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):)(\*|[0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


def offset_endpoint(endpoint: str, offset: int) -> str:
    """The endpoint of the publisher number `offset`: the next port of TCP (`*`, any free port, stays), a file of its
    own otherwise. Raises ValueError where that is no port any more."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return f"{endpoint}_dp{offset}" if offset else endpoint
    if match[2] == "*":
        return endpoint
    port = int(match[2]) + offset
    if not 0 < port < 65536:
        raise ValueError(f"{endpoint} with offset {offset} gives port {port}, which does not exist")
    return f"{match[1]}{port}"


class KVEventsConfig(BaseModel):
    """Names and meaning as in vLLM's --kv-events-config, except that endpoints are always bound, never connected to.

    Ports are those of the first publisher; see `for_instance` for the others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = Field(False, description="Publish what enters and leaves the cache.")
    publisher: Literal["zmq", "null"] = Field("zmq", description="zmq, or null: nothing is published.")
    endpoint: str = Field("tcp://127.0.0.1:5557", description="Where consumers subscribe: tcp://HOST:PORT, ipc://PATH.")
    replay_endpoint: str | None = Field(None, description="Where consumers ask for what they missed; none: nowhere.")
    buffer_steps: int = Field(10_000, ge=1, le=10_000_000, description="Latest batches kept for replay.")
    hwm: int = Field(100_000, ge=1, le=10_000_000, description="Batches queued per slow consumer before it loses some.")
    max_queue_size: int = Field(
        100_000, ge=1, le=10_000_000, description="Batches waiting to be sent; more push out the oldest."
    )
    topic: str = Field("", max_length=1024, description="First frame of every message; consumers subscribe to it.")
    format: Literal["tagged", "array"] = Field("tagged", description="Events as maps, or as positional arrays (older).")
    hash_format: Literal["int", "bytes"] = Field("int", description="Hashes: 64 bits as integer, or all 16 bytes.")
    medium_names: Literal["vllm", "sglang"] = Field(
        "vllm", description="Names of the tiers; sglang also makes integer hashes signed."
    )

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig:
        """Raises ValueError that names the field and says what is wrong."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"kv_events_config is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError('kv_events_config must be a JSON object such as {"enable_kv_cache_events": true}')
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" if item["loc"] else item["msg"]
                for item in error.errors(include_url=False)
            )
            raise ValueError(f"kv_events_config: {'; '.join(problems)}") from error

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is not None and _IPC.fullmatch(value) is None:
            if _TCP.fullmatch(value) is None:
                raise ValueError(f"{value!r} is not tcp://HOST:PORT or ipc://PATH")
            offset_endpoint(value, 0)
        return value

    @model_validator(mode="after")
    def _has_two_endpoints(self) -> KVEventsConfig:
        self._check_overlap(1)
        return self

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def for_instance(self, index: int, instances: int, ranks: int = 1) -> KVEventsConfig:
        """The config of instance `index` of `instances` on this host, each with `ranks` data-parallel publishers, so
        that none share a port. Raises ValueError where the ports of subscription and replay would overlap."""
        self._check_overlap(instances * ranks)
        offset = index * ranks
        replay = self.replay_endpoint
        return self.model_copy(
            update={
                "endpoint": offset_endpoint(self.endpoint, offset),
                "replay_endpoint": None if replay is None else offset_endpoint(replay, offset),
            }
        )

    def _check_overlap(self, publishers: int) -> None:
        if self.replay_endpoint is None:
            return
        first, second = _TCP.fullmatch(self.endpoint), _TCP.fullmatch(self.replay_endpoint)
        if first is None or second is None:
            overlap = self.endpoint == self.replay_endpoint
        elif "*" in (first[2], second[2]):
            overlap = False
        else:
            overlap = abs(int(first[2]) - int(second[2])) < publishers
        if overlap:
            raise ValueError(
                f"endpoint {self.endpoint} and replay_endpoint {self.replay_endpoint} must be at least {publishers} "
                f"ports apart: there are {publishers} publishers"
            )


def endpoint_for(config: KVEventsConfig, index: int) -> str:
    """Where consumers subscribe to publisher number `index` of this config."""
    return offset_endpoint(config.endpoint, index)


def replay_endpoint_for(config: KVEventsConfig, index: int) -> str | None:
    return None if config.replay_endpoint is None else offset_endpoint(config.replay_endpoint, index)
