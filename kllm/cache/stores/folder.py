"""A store's folder on disk: its layout, its format version, and whether it may be written.

STORE.json     {"store": "kllm", "format": 1}      made first; without it nothing else is touched
index/         LMDB environment (index.py)
segments/      segment files (segment.py)
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from kllm.cache.stores.index import Index
from kllm.cache.stores.segment import FILE_MODE, sync_folder
from kllm.cache.stores.store import StoreError

FORMAT = 1
_VERSION_FILE = "STORE.json"
_FOLDER_MODE = 0o700
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MOST_VERSION_BYTES = 4096


def explain(what: object, error: OSError) -> StoreError:
    """An operating system's error, for the operator."""
    if error.errno in _FULL:
        return StoreError(f"{what}: the disk is full; make room or give the store a lower capacity")
    if error.errno in _NOT_WRITABLE:
        return StoreError(f"{what} cannot be written: {error.strerror}")
    return StoreError(f"{what}: {error.strerror or error}")


class StoreFolder:
    """An existing store, opened. why_read_only: what keeps it from being written; None if it may be."""

    def __init__(self, path: Path, index: Index, why_read_only: str | None) -> None:
        self.path = path
        self.segments = path / "segments"
        self.index = index
        self.why_read_only = why_read_only

    def close(self) -> None:
        self.index.close()


def open_folder(path: Path, map_size: int = 0, *, create: bool = False, read_only: bool = False) -> StoreFolder:
    """create: make a store of an absent or empty folder. read_only: do not try to write; where writing is impossible
    the store is opened for reading in any case. map_size: of the index; 0 is as large as it is. Raises StoreError."""
    path = path.absolute()
    try:
        return _open_folder(path, map_size, create, "it was opened for reading" if read_only else None)
    except OSError as error:
        raise explain(path, error) from error


def _open_folder(path: Path, map_size: int, create: bool, asked: str | None) -> StoreFolder:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is not a folder")
    if create and asked is None:
        try:
            _create(path)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE or not (path / _VERSION_FILE).is_file():
                raise
    _check_version(path)
    index_path = path / "index"
    why = _why_not_writable((path / "segments", index_path), (index_path / "data.mdb", index_path / "lock.mdb"))
    index = Index(index_path, map_size, read_only=bool(why or asked), lock=why is None)
    if create and not index.read_only:
        sync_folder(index_path)
    return StoreFolder(path, index, why or asked)


def _why_not_writable(folders: tuple[Path, ...], files: tuple[Path, ...]) -> str | None:
    for path in folders + files:
        needed = os.R_OK | os.W_OK | (os.X_OK if path in folders else 0)
        if path.exists() and not os.access(path, needed, effective_ids=os.access in os.supports_effective_ids):
            return f"{path} is not writable"
    return None


def _create(path: Path) -> None:
    """Raises OSError, and StoreError for a folder with other things in it."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    version_file = path / _VERSION_FILE
    if not version_file.exists():
        others = [name for name in os.listdir(path) if not name.startswith(_VERSION_FILE) and name != "lost+found"]
        if others and not version_file.exists():
            raise StoreError(f"{path} is not a kLLM store and not empty (it holds {others[0]}): give an empty folder")
        _write_version(version_file)
    made = False
    for name in ("index", "segments"):
        if not (path / name).is_dir():
            (path / name).mkdir(mode=_FOLDER_MODE, exist_ok=True)
            made = True
    if made:
        sync_folder(path)


def _write_version(version_file: Path) -> None:
    temporary = version_file.with_name(f"{_VERSION_FILE}.{os.getpid()}")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        os.write(fd, json.dumps({"store": "kllm", "format": FORMAT}).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, version_file)
    sync_folder(version_file.parent)


def _check_version(path: Path) -> None:
    version_file = path / _VERSION_FILE
    if not path.is_dir():
        raise StoreError(f"{path} does not exist")
    try:
        with version_file.open("rb") as file:
            raw = file.read(_MOST_VERSION_BYTES)
    except FileNotFoundError:
        raise StoreError(f"{path} is not a kLLM store: it has no {_VERSION_FILE}") from None
    except OSError as error:
        raise StoreError(f"{version_file} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(raw)
        store, version = content["store"], content["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{version_file} is damaged, or not of a kLLM store") from None
    if store != "kllm":
        raise StoreError(f"{path} is not a kLLM store: {version_file} says store {store!r}")
    if version != FORMAT:
        raise StoreError(f"{path} has format {version!r}, this version of kLLM knows format {FORMAT}")
