"""What the operator sees while instances start: a bar each on a terminal, log lines elsewhere. Standard error only."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kllm.messages import Starting
from kllm.telemetry.logs import fields

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger("kllm.server")


class StartDisplay:
    """`update` is the gateway's on_starting; after `close`, and where there is no terminal, it only logs.

    instances: as many there are at first; others may join."""

    def __init__(self, instances: int) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._phases: dict[int, str] = {}
        self._several = instances > 1
        self._drawing = sys.stderr.isatty()

    def update(self, index: int, message: Starting) -> None:
        if message.phase != self._phases.get(index):
            self._phases[index] = message.phase
            which = {"instance": index} if self._several or index > 0 else {}
            log = logger.debug if self._drawing else logger.info
            log("instance is starting", extra=fields(**which, phase=message.phase))
        if self._drawing:
            self._draw(index, message)

    def _draw(self, index: int, message: Starting) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task("", total=1.0)
        self._progress.update(self._tasks[index], description=message.phase, completed=message.fraction)

    def close(self) -> None:
        self._drawing = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
