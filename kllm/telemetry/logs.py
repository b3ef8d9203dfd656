"""Logs: one line per event on stderr, as `key=value` pairs that both people and collectors read.

    2026-01-31T12:00:00.123Z info kllm.server msg="POST /v1/completions" request_id=cmpl-1 status=200 ms=12.3

Fields come from `extra={"fields": {...}}`. Values with blanks, quotes or line breaks are quoted as JSON strings, so
that no input can forge a line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/@+-")


class LineFormatter(logging.Formatter):
    """One line per record; an exception becomes the field `trace`, with its line breaks escaped."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), record.name]
        fields: dict[str, Any] = {"msg": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        parts += [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]
        return " ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and _PLAIN.issuperset(text):
        return text
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()


def configure_logs(level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log of this process to `stream` (stderr by default), from `level` on. May be called again."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "httpx", "httpcore", "asyncio", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def fields(**values: Any) -> Mapping[str, Any]:
    """Keyword arguments as the `extra` of a logging call: log.info("done", extra=fields(request_id=...))."""
    return {"fields": values}
