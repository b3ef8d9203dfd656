"""Workers whose work takes simulated time: what the function costs in production, not what it costs here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

# Seconds a call, measured on one core of a server CPU with SmolLM2's vocabulary: a JSON schema of a dozen fields, and
# the masks of a row inside a document of that schema (median 40 µs, mean 54 µs, at most 1.3 ms).
MEASURED_S: Mapping[str, float] = {"GrammarCompiler.compile": 1.2e-3, "compute_masks": 54e-6}
HASHED_BLOCK_S = 1e-6  # naming a block of 64 tokens, measured likewise


class SimulatedWorkers:
    """The Workers port. seconds: cost by the function's qualified name; others take `otherwise_s`."""

    def __init__(self, seconds: Mapping[str, float] = MEASURED_S, otherwise_s: float = 1e-4) -> None:
        self._seconds = seconds
        self._otherwise_s = otherwise_s

    async def run(self, function: Callable[..., T], *args: object) -> T:
        await asyncio.sleep(self._cost_s(getattr(function, "__qualname__", ""), args))
        return function(*args)

    def _cost_s(self, name: str, args: tuple[object, ...]) -> float:
        match name, args:
            case "chain_politely", (_, bytes() as raw, int() as width):
                return HASHED_BLOCK_S * len(raw) / width
        return self._seconds.get(name, self._otherwise_s)
