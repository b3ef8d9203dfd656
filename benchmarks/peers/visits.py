"""One visit: a fresh process of one engine, what it tells, how much memory and time it takes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.workload import Workload

RUNNERS = Path(__file__).parent / "runners"
_LAST_LINES = 4
_TICK_S = 0.25
_EXIT_S = 10.0  # from closing its output to having ended


@dataclass
class Visit:
    """samples: field of a result to its values. tokens: the first of the warm-up's answer. peak_rss_mb: None where
    the system does not tell. other_cores: cores that other processes kept busy meanwhile, on average.
    error: why it ended early; what had been taken until then counts."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    version: str | None = None
    tokens: list[int] = field(default_factory=list)
    peak_rss_mb: float | None = None
    other_cores: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Setting:
    """What is the same for all visits of a run. prompts: as written by Prompts.write. limit_s: of one visit."""

    workload: Workload
    prompts: Path
    figures: list[str]
    cores: int
    limit_s: float
    logs: Path


def run_visit(
    engine: Engine, python: Path, model: Path, variables: dict[str, str], setting: Setting, tell: Callable[[str], None]
) -> Visit:
    """Never raises for what the engine does: a crash, nonsense or too much time ends in `error`."""
    work = setting.workload
    log, job = setting.logs / f"{engine.name}.log", setting.logs / f"{engine.name}.job.json"
    described = {
        "model": str(model),
        "options": dict(engine.options),
        "cores": setting.cores,
        "figures": [name for name in setting.figures if name not in engine.leaves_out],
        "output": work.output,
        "sizes": {
            "tokens": work.long + work.output,
            "batch": work.batch,
            "batch_tokens": work.prompt + work.output,
            "shared": work.shared,
        },
        "prompts": str(setting.prompts),
    }
    visit = Visit()
    clock = _OtherWork()
    with open(log, "w", encoding="utf-8") as errors:
        job.write_text(json.dumps({**described, "started": time.time()}), encoding="utf-8")
        process = subprocess.Popen(
            [str(python), str(RUNNERS / engine.runner), str(job)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        processes = _Processes(process.pid)
        try:
            in_time = _listen(process, processes, visit, setting.limit_s, tell)
        finally:
            _end(process)
    visit.peak_rss_mb = processes.peak_mb
    visit.other_cores = clock.cores(processes.cpu_s)
    if not in_time:
        visit.error = f"stopped after its time limit of {setting.limit_s:g} s"
    elif process.returncode:
        visit.error = f"{_status(process.returncode)}: {' | '.join(_last_lines(log))}"
    return visit


def _listen(
    process: subprocess.Popen[bytes], processes: _Processes, visit: Visit, limit_s: float, tell: Callable[[str], None]
) -> bool:
    """Take in what the runner tells until it has ended; False if that takes too long."""
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            processes.look()
            if not selector.select(_TICK_S):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return _ended(process)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _take(line, visit, tell)
    return False


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _take(line: bytes, visit: Visit, tell: Callable[[str], None]) -> None:
    """One line of a runner. What is not of the agreed form is left out; figures must be positive numbers."""
    try:
        message: Any = json.loads(line)
    except ValueError:
        return
    if not isinstance(message, dict):
        return
    if isinstance(message.get("version"), str):
        visit.version = message["version"]
    if isinstance(message.get("tokens"), list):
        visit.tokens = message["tokens"]
    name, value = message.get("figure"), message.get("value")
    if isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value) and value > 0:
        visit.samples.setdefault(name, []).append(float(value))
        tell(f"{name} {value:,.4g}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it may have left running in its session, are gone afterwards."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _last_lines(log: Path) -> list[str]:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line[:300] for line in lines if line][-_LAST_LINES:] or ["no output"]


class _Processes:
    """Those of one session: their peak memory and the processor time that they took.

    Memory is the sum of proportional set sizes (PSS). Reading them walks page tables and holds the process up, so it
    is done only when the plain resident sizes, which cost nothing, have grown past what they were then."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._resident = 0
        self.peak_mb: float | None = None
        self.cpu_s = 0.0

    def look(self) -> None:
        stats = {entry: stat for entry in Path("/proc").glob("[0-9]*") if (stat := self._ours(entry))}
        ticks = sum(int(value) for stat in stats.values() for value in stat[11:15])  # with children that have ended
        self.cpu_s = max(self.cpu_s, ticks / os.sysconf("SC_CLK_TCK"))
        resident = sum(int(stat[21]) for stat in stats.values())
        if resident > 1.01 * self._resident:
            self._resident = resident
            pss = sum(_pss_kib(entry) for entry in stats) / 1024
            self.peak_mb = max(self.peak_mb or 0.0, pss) or None

    def _ours(self, entry: Path) -> list[str] | None:
        """/proc/PID/stat from its third field (state) on, None for a process of another session."""
        try:
            stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return stat if int(stat[3]) == self._session else None


def _pss_kib(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


class _OtherWork:
    """How busy the machine was with other things than this process and an engine's."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy_s(), time.process_time()

    def cores(self, engine_s: float) -> float:
        other = (_busy_s() - self._busy) - (time.process_time() - self._own) - engine_s
        return round(max(0.0, other / (time.monotonic() - self._start)), 2)


def _busy_s() -> float:
    """Processor seconds that the machine has spent on anything, 0 where it does not tell."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_python() -> Path:
    return Path(sys.executable)
