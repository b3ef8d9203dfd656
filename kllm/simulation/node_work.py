"""NodeWork: copies and calls that a process on a node waits for."""

from __future__ import annotations

import asyncio

from kllm.simulation.node import Node

RETRY_S = 0.2  # after so long a machine that was cut off notices that it can be reached again


class NodeWork:
    """Each ends at its time; later, if the process stands still then or the other end cannot be reached; and at once
    when the process ends."""

    def __init__(self, node: Node) -> None:
        self.over = False  # the process has ended
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[bool], None] = {}  # in order: a set's order is another one in every process

    async def until(self, when: float, *, remote: bool = False) -> bool:
        """Waits for `when`, in seconds of the loop. Whether it came; else the process ended. remote: it takes another
        node too."""
        if self.over:
            return False
        came: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[came] = None
        self._loop.call_at(when, self._due, came, remote)
        try:
            return await came
        finally:
            del self._waiting[came]

    def end(self) -> None:
        """The process is gone: nothing of it waits any more."""
        self.over = True
        for came in self._waiting:
            if not came.done():
                came.set_result(False)

    def _due(self, came: asyncio.Future[bool], remote: bool) -> None:
        if came.done():
            return
        if remote and self._node.unreachable:
            self._loop.call_later(RETRY_S, self._due, came, remote)
        elif self._node.frozen:
            self._node.when_running(lambda: self._due(came, remote))
        else:
            came.set_result(True)
