"""fleet.toml: what a gateway serves, and where its instances are.

model = "smollm2"                       # whose tokenizer and chat template the gateway uses
key_file = "fleet.key"                  # relative to this file; only for addresses beyond this machine

[server]                                # fields of ServerConfig
port = 8000

[[instance]]                            # started elsewhere with `kllm instance`
address = "tcp://127.0.0.1:7001"
role = "prefill"

[[external]]                            # fields of ExternalEngine
url = "http://127.0.0.1:8001"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.prefix_index import MOST_INSTANCES
from kllm.config import Config, ServerConfig
from kllm.messages import Role
from kllm.transport.addresses import AddressError, need_key, normalize
from kllm.transport.fleet_key import FleetKey, KeyFileError, read_key

MAX_BYTES = 2**20
LOCAL_FIELDS = ("instances", "prefill", "decode")  # of ServerConfig: they start instances here


class FleetConfigError(ValueError):
    """The file cannot be used; the message names it and what is wrong where."""


class RemoteInstanceEntry(Config):
    """An instance that listens: `kllm instance MODEL --listen ADDRESS`."""

    address: Annotated[str, AfterValidator(normalize)] = Field(description="tcp://HOST:PORT or ipc:///PATH.")
    role: Role | None = Field(None, description="What it is used for; as it was started if left out.")


Entry = RemoteInstanceEntry | ExternalEngine


class FleetConfig(Config):
    """One gateway and its fleet."""

    model: str = Field(description="Alias, local folder, .gguf file or hub id of the model that the instances serve.")
    key_file: Path | None = Field(None, description="The fleet's secret (docs/fleet.md).")
    server: ServerConfig = Field(ServerConfig.model_validate({}), description="The HTTP server.")
    instance: list[RemoteInstanceEntry] = Field([], description="Those started with `kllm instance`.")
    external: list[ExternalEngine] = Field([], description="Engines of others, over HTTP.")

    @property
    def entries(self) -> list[Entry]:
        """All members of the fleet."""
        return [*self.instance, *self.external]


def name_of(entry: Entry) -> str:
    """Where it is: no two entries have the same."""
    return entry.address if isinstance(entry, RemoteInstanceEntry) else entry.url


def read_fleet(path: Path) -> tuple[FleetConfig, FleetKey | None]:
    """Raises FleetConfigError."""
    text = _read_text(path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FleetConfigError(f"{path}: is not TOML: {error}") from error
    try:
        config = FleetConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ")
        raise _wrong(path, text, first["loc"], said[0].lower() + said[1:], first.get("input")) from error
    _check(path, text, config)
    return config, _read_key(path, text, config)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FleetConfigError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise FleetConfigError(f"{path}: larger than {MAX_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FleetConfigError(f"{path}: is not text in UTF-8") from error


def _check(path: Path, text: str, config: FleetConfig) -> None:
    for name in LOCAL_FIELDS:
        if name in config.server.model_fields_set:
            raise _wrong(path, text, ("server", name), "instances of a fleet are started with `kllm instance`")
    if not config.entries:
        raise FleetConfigError(f"{path}: names no [[instance]] and no [[external]]")
    if len(config.entries) > MOST_INSTANCES:
        raise FleetConfigError(f"{path}: has more than {MOST_INSTANCES} instances")
    seen: set[str] = set()
    places = [("instance", index, "address") for index in range(len(config.instance))]
    places += [("external", index, "url") for index in range(len(config.external))]
    for place, entry in zip(places, config.entries, strict=True):
        if name_of(entry) in seen:
            raise _wrong(path, text, place, f"{name_of(entry)} is there twice")
        seen.add(name_of(entry))


def _read_key(path: Path, text: str, config: FleetConfig) -> FleetKey | None:
    key = None
    if config.key_file is not None:
        try:
            key = read_key(path.parent / config.key_file)
        except KeyFileError as error:
            raise _wrong(path, text, ("key_file",), str(error)) from error
    for index, entry in enumerate(config.instance):
        try:
            need_key(entry.address, has_key=key is not None)
        except AddressError as error:
            raise _wrong(path, text, ("instance", index, "address"), str(error)) from error
    return key


def _wrong(path: Path, text: str, loc: Sequence[int | str], problem: str, given: Any = None) -> FleetConfigError:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    line = _line_of(text, loc)
    got = f" (got {given!r})" if isinstance(given, str | int | float) else ""
    return FleetConfigError(f"{path}{f', line {line}' if line else ''}: {field}: {problem}{got}")


def _line_of(text: str, loc: Sequence[int | str]) -> int | None:
    """Where a field is written, or the head of its table; None if that is not found."""
    head, index = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        table = re.match(r"\s*\[+\s*([\w-]+)\s*\]", line)
        if table is not None:
            if head is not None:
                return head  # its table is over
            if len(loc) > 1 and table[1] == loc[0]:
                if not isinstance(loc[1], int) or index == loc[1]:
                    head = number
                index += 1
        elif (head is not None or len(loc) == 1) and re.match(rf"\s*{re.escape(str(loc[-1]))}\s*=", line):
            return number
    return head
