"""`kllm instance` and `kllm gateway` as an operator starts them: each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from support.live_server import HANG_S, START_S, LiveServer


class LiveInstance:
    """A context manager around one `kllm instance`. On leaving it is told to end, and must do so well unless it was
    killed. address: where it listens. before: goes before its command."""

    def __init__(self, model: Path | str, *flags: str, before: Sequence[str] = ()) -> None:
        self._command = [*before, sys.executable, "-m", "kllm.cli", "instance", str(model), *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on leaving

    def __enter__(self) -> LiveInstance:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._read_line("kLLM instance listens at ")
        self.address = self.line.split()[4]
        return self

    def wait_ready(self) -> None:
        self._read_line("kLLM instance is ready: ")

    def _read_line(self, start: str) -> None:
        """The next line on standard output, which must begin so."""
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        watchdog.cancel()
        if not self.line.startswith(start):
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the instance said {self.line!r}\n{self.log}")

    def __exit__(self, *error: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(HANG_S)
            if error[0] is not None:
                print(self.log, file=sys.stderr)  # pytest shows it beside the failure
            else:
                assert code in (0, -signal.SIGKILL), f"{code}\n{self.log}"
                assert "Traceback" not in self.log
        finally:
            self.process.kill()
            self.process.communicate()
            self._log.close()

    @property
    def log(self) -> str:
        """All that it has written to standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")


class LiveGateway(LiveServer):
    """One `kllm gateway` over a fleet.toml."""

    def __init__(self, config: Path, *flags: str) -> None:
        super().__init__(config)
        self._command = [sys.executable, "-m", "kllm.cli", "gateway", "--config", str(config), "--port", "0", *flags]
