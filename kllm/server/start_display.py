"""What the operator sees while an instance starts: a bar on a terminal, log lines elsewhere. Standard error only."""

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
    """`update` is the gateway's on_starting; after `close`, and where there is no terminal, it only logs."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._drawing = sys.stderr.isatty()

    def update(self, message: Starting) -> None:
        if message.phase != self._phase:
            self._phase = message.phase
            log = logger.debug if self._drawing else logger.info
            log("instance is starting", extra=fields(phase=message.phase))
        if self._drawing:
            self._draw(message)

    def _draw(self, message: Starting) -> None:
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("", total=1.0)
            self._progress.start()
        self._progress.update(self._task, description=message.phase, completed=message.fraction)

    def close(self) -> None:
        self._drawing = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
