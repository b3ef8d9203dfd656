"""The user's cache folder: one folder per downloaded model, changed under a lock, completed by a rename.

<cache>/models/<name>/
    source.json        what is here and where it came from; written last, so its presence means "complete"
    lock               held while a process downloads into this folder
    partial-*/         whatever a download in progress wrote; removed before the next one starts
    *.gguf             complete, checksum verified
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kllm.hub.source import ModelSource, ModelSourceError


class Record(msgspec.Struct, frozen=True):
    """What source.json says. path is absolute, or relative to the model's cache folder. size: bytes of a GGUF."""

    kind: Literal["folder", "gguf"]
    path: str
    origin: Literal["hub", "wheel"]
    size: int = 0


def models_folder() -> Path:
    """XDG_CACHE_HOME/kllm/models, by default ~/.cache/kllm/models. Not created here."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kllm" / "models"


def quantized_folder() -> Path:
    """Where weights quantised while loading are kept for the next start. Not created here."""
    return models_folder().parent / "quantized"


class ModelCache:
    """The cache folder of one model. Readers need no lock: they see source.json whole or not at all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = models_folder() / name.replace("/", "--")

    def record(self) -> Record | None:
        """What was downloaded, None if nothing (or nothing legible) was."""
        try:
            return msgspec.json.decode((self.folder / "source.json").read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None

    def find(self) -> ModelSource | None:
        """The model if it is here complete, without asking any network."""
        record = self.record()
        if record is None:
            return None
        path = self.folder / record.path
        try:
            whole = path.is_dir() if record.kind == "folder" else path.stat().st_size == record.size
        except OSError:
            return None
        return ModelSource(self.name, record.kind, path) if whole else None

    def write(self, record: Record) -> ModelSource:
        """Publish what was downloaded. Call under `locked`."""
        temporary = self.folder / "source.json.tmp"
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, self.folder / "source.json")
        source = self.find()
        if source is None:
            raise ModelSourceError(f"{self.folder / record.path}: vanished while it was being cached")
        return source

    @contextlib.contextmanager
    def locked(self) -> Iterator[Path]:
        """Hold this model's lock and give an empty folder for unfinished files, removed at the end.

        Waits for another process that is downloading the same model, and says so on stderr. The lock goes away with
        its process, however that ends; what it left unfinished is removed here. OSErrors inside (a full disk, a
        missing permission) come out as ModelSourceError."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "w") as lock:
                self._acquire(lock.fileno())
                for leftover in self.folder.glob("partial-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(
                    prefix="partial-", dir=self.folder, ignore_cleanup_errors=True
                ) as name:
                    yield Path(name)

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is downloading {self.name}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn OSErrors (full disk, no permission) into ModelSourceErrors that name the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        raise ModelSourceError(f"{where}: {error.strerror or error}") from error
