"""One virtual environment per peer, installed once from a file that pins every package in it.

<cache>/NAME/             the environment; NAME.log beside it holds pip's output
<cache>/NAME/.installed   digest of the requirements that are in it, written last

The files list whole closures and are installed without dependencies: otherwise pip would replace the CPU build of
torch, or bring libraries for GPUs along. torch itself goes first and with its dependencies, from wherever
`pip_options` says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
TCMALLOC = "libtcmalloc-minimal4"  # Debian's and Ubuntu's package; vLLM asks for it on CPUs
_LAST_LINES = 6

Tell = Callable[[str], None]


class SetupError(Exception):
    """A peer cannot be installed or its model not converted. The message holds the last lines of what was tried."""


class Environments:
    """pip_options: added to every `pip install`, such as an index that has torch for the CPU."""

    def __init__(self, cache: Path, pip_options: Sequence[str] = (), requirements: Path = REQUIREMENTS) -> None:
        self.cache = cache
        self._pip_options = list(pip_options)
        self._requirements = requirements

    def python(self, name: str) -> Path:
        return self.cache / name / "bin" / "python"

    def install(self, name: str, tell: Tell) -> None:
        """Make the environment unless it is there as pinned. tell: gets one line per step. Raises SetupError."""
        pinned = self._requirements / f"{name}.txt"
        try:
            text = pinned.read_text(encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{pinned}: {error.strerror}") from error
        folder, digest = self.cache / name, hashlib.sha256(text.encode()).hexdigest()
        stamp = folder / ".installed"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        tell(f"{name}: making its environment")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        torch = [line for line in text.splitlines() if line.startswith("torch==")]
        if torch:
            self._pip(name, torch, tell)
        self._pip(name, ["--no-deps", "--requirement", str(pinned)], tell)
        if name.startswith("vllm"):
            _fetch_tcmalloc(folder, tell)
        stamp.write_text(digest, encoding="utf-8")

    def run(self, name: str, script: Path, arguments: Sequence[str], tell: Tell) -> None:
        """A script in an environment, its output into NAME.log. Raises SetupError."""
        follow([str(self.python(name)), str(script), *arguments], self.cache / f"{name}.log", tell, name)

    def _pip(self, name: str, arguments: Sequence[str], tell: Tell) -> None:
        command = [str(self.python(name)), "-m", "pip", "install", *self._pip_options, *arguments]
        follow(command, self.cache / f"{name}.log", tell, name)

    def variables(self, name: str | None, cores: int) -> dict[str, str]:
        """Environment variables that an engine's processes get, beside those of this process."""
        common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if name is None or not name.startswith("vllm"):
            return common
        preload = [*self._libraries(name, "libtcmalloc_minimal.so.4"), *self._libraries(name, "libiomp5.so")]
        return common | {
            "LD_PRELOAD": ":".join(map(str, preload)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",  # its default leaves a core idle
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CACHE_ROOT": str(self.cache / f"{name}-cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }

    def _libraries(self, name: str, file: str) -> Iterator[Path]:
        places = [*(self.cache / name / "lib").glob(file), *(self.cache / name / "tcmalloc").rglob(file)]
        yield from places[:1] or [path for path in map(Path, _system_libraries(file)) if path.exists()][:1]


def follow(command: Sequence[str], log: Path, tell: Tell, name: str) -> None:
    """Run a command to its end: all output into `log`, each line also to `tell`. Raises SetupError with the last."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with open(log, "a", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except OSError as error:
            raise SetupError(f"{command[0]}: {error.strerror}") from error
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if text := line.strip():
                lines = [*lines[1 - _LAST_LINES :], text]
                tell(f"{name}: {text[:200]}")
    if status := process.wait():
        raise SetupError(f"status {status} of {Path(command[0]).name} {' '.join(command[1:4])} …: " + " | ".join(lines))


def _fetch_tcmalloc(folder: Path, tell: Tell) -> None:
    """vLLM is slower without it. Unpacked beside the environment, where the system has none; left out if the
    distribution is another one, which the run then says."""
    if any(Path(path).exists() for path in _system_libraries("libtcmalloc_minimal.so.4")):
        return
    target = folder / "tcmalloc"
    target.mkdir()
    try:
        subprocess.run(["apt-get", "download", TCMALLOC], cwd=target, check=True, capture_output=True)
        for package in target.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        tell(f"vllm: {TCMALLOC} is not here and cannot be fetched: vLLM runs without it")


def _system_libraries(file: str) -> list[str]:
    machine = f"{os.uname().machine}-linux-gnu"
    return [f"/usr/lib/{machine}/{file}", f"/usr/lib64/{file}", f"/usr/lib/{file}"]
