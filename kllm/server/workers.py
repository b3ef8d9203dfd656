"""CPU-heavy work off the event loop: tokenising, rendering templates, decoding large bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARS = 2048  # less text than this costs less to tokenise than to hand to a thread
CALL_CHARS = 8  # a call of the tokenizer costs as much as so many characters


class Workers:
    """A few threads. The tokenizer releases the GIL, so they take long prompts away from streaming."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kllm-worker")

    async def run(self, size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args), in a thread when `size` (characters or bytes) is worth one. Raises what fn raises."""
        if size < INLINE_CHARS:
            return fn(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: fn(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
