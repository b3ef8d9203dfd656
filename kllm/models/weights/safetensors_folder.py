"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kllm.hub.source import weight_files
from kllm.kernels.linear import QuantizedRows
from kllm.models.weights.interface import WeightError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_REOPEN_BYTES = 64 << 20


class SafetensorsFolder:
    """A Checkpoint over mapped files. Every file's header is checked against the file's size when it is opened.

    config: the folder's, already normalised."""

    config: dict[str, Any]

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.config_file = str(folder / "config.json")
        self._folder = folder
        if config.get("quantization_config"):
            method = config["quantization_config"]
            kind = method.get("quant_method") if isinstance(method, dict) else method
            raise WeightError(f"{self.config_file}: quantised weights ({kind}) are not supported")
        self._shards, self._index = self._open()
        self.files = tuple(sorted({shard.path for shard in self._shards.values()}))

    def names(self) -> Iterable[str]:
        return self._shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(name)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shard = self._shard(name)
        try:
            return shard.read(name, tuple(shape), dtype)
        except SafetensorError as error:
            raise WeightError(f"{shard.path}: tensor {name} cannot be read ({error})") from error

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        return None

    def _shard(self, name: str) -> _Shard:
        shard = self._shards.get(name)
        if shard is None:
            raise WeightError(f"{self._index}: tensor {name} is missing")
        return shard

    def _open(self) -> tuple[dict[str, _Shard], Path]:
        """Every tensor's file, and the file that says so (for messages)."""
        files = weight_files(self._folder)
        index = self._folder / _INDEX
        if index.exists():
            return self._from_index(index), index
        if self._folder / _SINGLE in files:
            files = [self._folder / _SINGLE]  # others beside it are copies in another form
        shards: dict[str, _Shard] = {}
        for file in files:
            shard = _Shard(file)
            for name in shard.names:
                if name in shards:
                    raise WeightError(f"{file}: tensor {name} is also in {shards[name].path.name}")
                shards[name] = shard
        return shards, files[0] if len(files) == 1 else self._folder

    def _from_index(self, index: Path) -> dict[str, _Shard]:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            entries = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightError(f"{index}: not a valid index of shards ({type(error).__name__}: {error})") from error
        shards: dict[str, _Shard] = {}
        for file in sorted(set(entries.values())):
            if Path(file).name != file:
                raise WeightError(f"{index}: names a file outside the folder: {file}")
            if not (self._folder / file).exists():
                raise WeightError(f"{self._folder / file}: missing, though {_INDEX} names it")
            shards[file] = _Shard(self._folder / file)
        for name, file in entries.items():
            if name not in shards[file].names:
                raise WeightError(f"{self._folder / file}: tensor {name} is missing, though {_INDEX} places it here")
        return {name: shards[file] for name, file in entries.items()}


class _Shard:
    """One mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._map()
        self.names = frozenset(self._file.keys())
        self._read = 0

    def _map(self) -> Any:
        try:
            return safe_open(str(self.path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self.path}: truncated or damaged safetensors file ({error})") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A copy in dtype. Pages read so far are let go by mapping the file anew every 64 MiB, which takes 0.2 ms."""
        part = self._file.get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise WeightError(f"{self.path}: tensor {name} has shape {list(part.get_shape())}, expected {list(shape)}")
        if part.get_dtype() not in _FLOATS:
            known = ", ".join(_FLOATS)
            raise WeightError(f"{self.path}: tensor {name} has type {part.get_dtype()}, expected one of {known}")
        mapped = self._file.get_tensor(name)
        copy = torch.empty(shape, dtype=dtype).copy_(mapped)
        self._read += mapped.nbytes
        del mapped
        if self._read >= _REOPEN_BYTES:
            self._file, self._read = self._map(), 0
        return copy
