"""Reads fields of a checkpoint's config with errors that say which field is wrong."""

from __future__ import annotations

import math
from typing import Any

from kllm.models.weights.interface import WeightError

MAX_INT = 2**31


class ModelConfig:
    """Typed access to config.json. Every method raises WeightError naming the field and what it should be."""

    def __init__(self, fields: dict[str, Any], where: str = "config") -> None:
        self._fields = fields
        self._where = where

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def with_default(self, name: str, value: object) -> ModelConfig:
        """The same config, with a value for a field that is missing or null."""
        return self if self.has(name) else ModelConfig({**self._fields, name: value}, self._where)

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < MAX_INT:
            raise self.error(name, f"must be an integer of at least {low}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
            raise self.error(name, f"must be a finite number of at least {low:g}, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def section(self, name: str) -> ModelConfig | None:
        """A nested object, or None when it is missing or null."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return ModelConfig(value, f"{self._where}.{name}")

    def require(self, name: str, allowed: tuple[object, ...], default: object) -> None:
        """The field, where given, has one of these values."""
        value = self._fields.get(name, default)
        if value is None:
            value = default
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise self.error(name, f"{value!r} is not supported (only {choices})")

    def error(self, name: str, problem: str) -> WeightError:
        return WeightError(f"{self._where}: {name} {problem}")

    def _value(self, name: str, default: object) -> object:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
