"""The GGUF container (versions 2 and 3, little endian): metadata, and where each tensor's bytes lie.

    magic "GGUF" | u32 version | u64 tensors | u64 key-values
    key-values:   string key | u32 type | value          string = u64 length | UTF-8
    tensors:      string name | u32 dims | u64 × dims (fastest first) | u32 type | u64 offset into the data
    padding to general.alignment, then the data

Written from the format's description in ggml's docs/gguf.md. A vocabulary is 100,000 strings, so string arrays are
only skipped over when the file is opened and decoded when asked for (about 15 ms and 40 ms for SmolLM2).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kllm.hub.source import ModelSourceError

T = TypeVar("T")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_ELEMENTS = 1 << 24  # of one metadata array
_MAX_DIMS = 4


class TensorType(msgspec.Struct, frozen=True):
    """How a tensor type packs its elements: `block` elements in `size` bytes."""

    name: str
    block: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}


class TensorInfo(msgspec.Struct, frozen=True):
    """shape: slowest dimension first, as torch counts. start, end: bytes in the file, inside its bounds."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int
    end: int


class StringArray(msgspec.Struct, frozen=True):
    """An array of strings in the metadata, still undecoded: `count` strings from byte `start`."""

    start: int
    count: int


class GGUFFile:
    """An open GGUF file, mapped read-only. metadata values: int, float, bool, str, tuple of numbers, StringArray.

    Raises ModelSourceError, naming the file, for anything that is not a whole and sound GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelSourceError(f"{path}: cannot be read ({error})") from error
        try:
            reader = _Reader(self.data)
            tensor_count, key_count = reader.start()
            self.metadata = {reader.string(): reader.value() for _ in range(key_count)}
            self.tensors = self._read_tensors(reader, tensor_count)
        except (struct.error, OverflowError, IndexError, UnicodeDecodeError, _Damaged) as error:
            raise ModelSourceError(f"{path}: truncated or damaged GGUF file ({error})") from error

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """metadata[key] if it is of this type; default if the key is absent. Raises ModelSourceError otherwise."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            what = "is missing" if value is None else f"is {value!r:.60}, expected {kind.__name__}"
            raise ModelSourceError(f"{self.path}: metadata key {key} {what}")
        return value

    def strings(self, key: str) -> list[str]:
        """The array of strings under this key. Raises ModelSourceError if there is none."""
        array = self.get(key, StringArray)
        try:
            return _Reader(self.data, array.start).strings(array.count)
        except UnicodeDecodeError as error:
            raise ModelSourceError(f"{self.path}: metadata key {key} holds invalid UTF-8") from error

    def _read_tensors(self, reader: _Reader, count: int) -> dict[str, TensorInfo]:
        raw = [reader.tensor() for _ in range(count)]
        alignment = self.get("general.alignment", int, 32)
        if alignment <= 0 or alignment % 8:
            raise _Damaged(f"alignment {alignment}")
        base = -(-reader.position // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in raw:
            if name in tensors:
                raise ModelSourceError(f"{self.path}: tensor {name} occurs twice")
            tensors[name] = self._tensor(name, shape, type_id, base + offset)
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise ModelSourceError(f"{self.path}: tensor {name} has type {type_id}, known are {known}")
        elements = 1
        for size in shape:
            elements *= size
        if not shape or elements == 0 or shape[-1] % kind.block:
            raise ModelSourceError(f"{self.path}: tensor {name} of type {kind.name} has an impossible shape {shape}")
        end = start + elements // kind.block * kind.size
        if end > len(self.data):
            raise ModelSourceError(
                f"{self.path}: truncated, tensor {name} ends at byte {end} of a file of {len(self.data)}"
            )
        return TensorInfo(name, shape, kind, start, end)


class _Damaged(Exception):
    """What is wrong inside the file; becomes a ModelSourceError that names it."""


class _Reader:
    """A position in the mapped file. Reading past the end raises struct.error or _Damaged."""

    def __init__(self, data: mmap.mmap, position: int = 0) -> None:
        self.data = data
        self.position = position

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def start(self) -> tuple[int, int]:
        """Read the fixed header. Returns (tensors, key-values)."""
        magic, version = self.unpack("4sI")
        if magic != b"GGUF":
            raise _Damaged("it does not start with GGUF")
        if version not in (2, 3):
            raise _Damaged(f"version {version:#x} is not supported, only 2 and 3, little endian")
        tensors, keys = self.unpack("QQ")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise _Damaged(f"it claims {tensors} tensors and {keys} metadata keys")
        return tensors, keys

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.position + length
        if end > len(self.data):
            raise _Damaged(f"a string of {length} bytes at byte {self.position}")
        text = self.data[self.position : end].decode()
        self.position = end
        return text

    def value(self) -> Any:
        (kind,) = self.unpack("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Damaged(f"metadata type {kind} at byte {self.position}")
        return self.unpack(_SCALARS[kind])[0]

    def _array(self) -> Any:
        kind, count = self.unpack("IQ")
        if count > _MAX_ELEMENTS:
            raise _Damaged(f"a metadata array of {count} elements")
        if kind == _STRING:
            array = StringArray(self.position, count)
            self._skip_strings(count)
            return array
        if kind not in _SCALARS:
            raise _Damaged(f"a metadata array of type {kind}")
        return self.unpack(f"{count}{_SCALARS[kind]}")

    def _skip_strings(self, count: int) -> None:
        data, position, length = self.data, self.position, _U64.unpack_from
        for _ in range(count):
            position += 8 + length(data, position)[0]
        if position > len(data):
            raise _Damaged("an array of strings ends past the file")
        self.position = position

    def strings(self, count: int) -> list[str]:
        """Decode strings that _skip_strings has checked."""
        data, position, length = self.data, self.position, _U64.unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + length(data, position)[0]
            texts.append(data[start:position].decode())
        return texts

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape slowest first, type, offset into the data)."""
        name = self.string()
        (dims,) = self.unpack("I")
        if dims > _MAX_DIMS:
            raise _Damaged(f"tensor {name} has {dims} dimensions")
        shape = self.unpack(f"{dims}Q")
        kind, offset = self.unpack("IQ")
        return name, tuple(reversed(shape)), kind, offset
