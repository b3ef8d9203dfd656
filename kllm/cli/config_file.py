"""A config from a file: its fields by name, as TOML, or as YAML where the name ends so and pyyaml is installed."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from kllm.cli.errors import CommandError, UsageError
from kllm.cli.options import ConfigT, Flags, build, flag_name
from kllm.config import Config

MAX_BYTES = 2**20


def build_with_file(config: type[ConfigT], path: Path, flags: Flags) -> ConfigT:
    """The config with the file's fields and, before those, the flags'. Raises OSError, UsageError naming the flag, or
    CommandError naming file and key."""
    values = read_fields(path, config)
    try:
        return build(config, values | flags)
    except UsageError as error:
        for name in values.keys() - flags.keys():
            where, told, problem = str(error).partition(f"{flag_name(name)}: ")
            if told and not where:  # it is about what the file says
                raise CommandError(f"{path}: {name}: {problem}") from error
        raise


def read_fields(path: Path, config: type[Config]) -> dict[str, Any]:
    """What the file sets: fields, whose values are not judged yet but flat (YAML can nest without end in a few lines).

    Raises CommandError, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise CommandError(f"{path}: larger than {MAX_BYTES:,} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: is not text in UTF-8") from error
    values = _read_yaml(path, text) if path.suffix in (".yaml", ".yml") else _read_toml(path, text)
    for name, value in values.items():
        if name not in config.model_fields:
            raise CommandError(f"{path}: unknown key {name!r}{_suggestion(name, config)}")
        if any(isinstance(part, list | dict) for part in (value if isinstance(value, list) else [value])):
            raise CommandError(f"{path}: {name}: must be one value, or a list of them")
    return values


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{path}: is not TOML: {error}") from error


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise CommandError(f"{path}: YAML needs pyyaml (pip install pyyaml); TOML needs nothing") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CommandError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise CommandError(f"{path}: must map names of options to values")
    return values


def _suggestion(name: str, config: type[Config]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), config.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
