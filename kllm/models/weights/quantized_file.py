"""Quantised matrices kept in a file, so that only the first start has to make them.

<folder>/<model>-<format>-<place>-<content>.safetensors     place: hash of the sources' paths
                                                            content: of their sizes, times and samples of their bytes
    `<tensor>`          U8, or I8 for int8: QuantizedRows.data (a file may hold several formats; its name says which
                        one was asked for)
    `<tensor>:scales`   U8 [rows, 4]: the float32 scales of int8, as bytes because a file may place them at any offset

Written under a lock (<...>.lock) as <...>.partial and completed by a rename. A file whose sources have changed is
removed by the one that takes its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kllm.kernels.linear import QuantizedRows
from kllm.models.weights.interface import WeightError
from kllm.quantization.block_encoders import BLOCK, BLOCK_BYTES

VERSION = 2  # of the quantisers: raise it when they give other bytes


class MatrixKind(NamedTuple):
    """Format and size of a quantised matrix."""

    format: str
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols


Matrices = Mapping[str, MatrixKind]

_KEY = "kllm"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_REOPEN_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class QuantizedFile:
    """The place for matrices of these kinds, quantised from these source files because `format` was asked for.

    Every method raises OSError for what the file system refuses."""

    def __init__(self, folder: Path, sources: Sequence[Path], format: str, matrices: Matrices) -> None:
        self._folder = folder
        self._matrices = matrices
        place, self._key = _fingerprints(sources, format)
        model = re.sub(r"[^\w.-]", "_", _model_name(sources))[:80]
        self._name = f"{model}-{format}-{place}-"
        self.path = folder / f"{self._name}{self._key}.safetensors"

    def open(self) -> QuantizedReader | None:
        """The matrices, or None if the file is not there or is not what it should be."""
        if not self.path.exists():
            return None
        try:
            return QuantizedReader(self.path, self._key, self._matrices)
        except WeightError as error:
            _log.warning("%s; it will be written anew", error)
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other processes that are writing this file, and keep them waiting."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process that is quantising the same weights")
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            yield

    def write(self, matrices: Iterable[tuple[str, QuantizedRows]]) -> None:
        """Matrices under their names and of their kinds, taken one by one. Call under `locked`."""
        partial = self.path.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                self._write(file, matrices)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for old in self._folder.glob(f"{self._name}*"):
            if old.stem != self.path.stem:
                old.unlink(missing_ok=True)

    def _write(self, file: BinaryIO, matrices: Iterable[tuple[str, QuantizedRows]]) -> None:
        """The header comes first in the file and is written last: room is left for the longest it can be."""
        metadata = {"__metadata__": {_KEY: self._key}}
        longest = [entry for name, kind in self._matrices.items() for entry in _entries(name, kind)]
        room = -(-len(_header(metadata, longest)) // 8) * 8
        file.seek(8 + room)
        written = []
        for name, matrix in matrices:
            written += _entries(name, MatrixKind(matrix.format, matrix.rows, matrix.cols))
            file.write(_bytes(matrix.data))
            if matrix.scales is not None:
                file.write(_bytes(matrix.scales))
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _header(metadata, written).ljust(room))


class QuantizedReader:
    """An open file of quantised matrices. Raises WeightError unless the file is whole and has this key, and all it
    holds are matrices of these kinds."""

    def __init__(self, path: Path, key: str, matrices: Matrices) -> None:
        self._path = path
        self._key = key
        self._matrices = matrices
        self._file = self._map()
        self._read = 0
        entries = [entry for name, kind in matrices.items() for entry in _entries(name, kind)]
        types = {name: (type, shape) for name, type, shape in entries}
        self._names = frozenset(self._file.keys())
        for name in self._names:
            part = self._file.get_slice(name)
            if types.get(name) != (part.get_dtype(), tuple(part.get_shape())):
                raise WeightError(f"{path}: tensor {name} does not belong there")
            scales = f"{name}:scales"
            if scales in types and scales not in self._names:
                raise WeightError(f"{path}: tensor {name} has no scales")

    def read(self, name: str) -> QuantizedRows | None:
        """The matrix, None if the file does not hold it. Its data is mapped memory: it lasts, but cannot be changed.

        Pages read so far are let go by mapping the file anew every 64 MiB, once nobody refers to them."""
        if name not in self._names:
            return None
        if self._read >= _REOPEN_BYTES:
            self._file, self._read = self._map(), 0
        data = self._file.get_tensor(name)
        self._read += data.nbytes
        scales = None
        kind = self._matrices[name]
        if kind.format == "int8":
            scales = self._file.get_tensor(f"{name}:scales").clone().view(torch.float32).view(-1)
        return QuantizedRows(*kind, data, scales)

    def _map(self) -> Any:
        try:
            file: Any = safe_open(str(self._path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self._path}: truncated or damaged file of quantised weights ({error})") from error
        if (file.metadata() or {}).get(_KEY) != self._key:
            raise WeightError(f"{self._path}: not a file of quantised weights, or of others")
        return file


def _entries(name: str, kind: MatrixKind) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors type, shape) of what a matrix is kept as."""
    format, rows, cols = kind
    if format == "int8":
        return [(name, "I8", (rows, cols)), (f"{name}:scales", "U8", (rows, 4))]
    return [(name, "U8", (rows, cols // BLOCK * BLOCK_BYTES[format]))]


def _header(metadata: dict[str, Any], entries: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The JSON of a safetensors header; all types here have one byte an element."""
    header, position = dict(metadata), 0
    for name, kind, shape in entries:
        end = position + shape[0] * shape[1]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (position, end)}
        position = end
    return json.dumps(header, separators=(",", ":")).encode()


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(array)


def _model_name(sources: Sequence[Path]) -> str:
    first = sources[0].absolute()
    return first.stem if first.suffix == ".gguf" else first.parent.name


def _fingerprints(sources: Sequence[Path], format: str) -> tuple[str, str]:
    """Hashes of where the sources are and of what they hold. Times alone would not do: in an image or an archive
    all files can have the same one."""
    place, content = hashlib.blake2b(digest_size=4), hashlib.blake2b(digest_size=12)
    content.update(f"{VERSION} {format}".encode())
    for source in sources:
        where = str(source.resolve()).encode()
        place.update(where + b"\0")
        with open(source, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            content.update(where + f"\0{status.st_size} {status.st_mtime_ns}\0".encode())
            for i in range(_SAMPLES):
                file.seek(status.st_size * i // _SAMPLES)
                content.update(file.read(_SAMPLE_BYTES))
    return place.hexdigest(), content.hexdigest()
