"""The Workers port: CPU-heavy work off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Workers(Protocol):
    """Runs CPU-heavy work off the event loop."""

    async def run(self, function: Callable[..., T], *args: object) -> T: ...
