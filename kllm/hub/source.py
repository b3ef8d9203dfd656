"""Where a model's files are, whatever name the user gave."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class ModelSourceError(ValueError):
    """A model cannot be found, fetched or read. The message says what to do and, where there is one, names the file."""


class ModelSource(msgspec.Struct, frozen=True):
    """Files of one model on this machine.

    name: what the user asked for (alias, hub id or path). kind "folder": path is a Hugging Face folder
    (config.json and safetensors); "gguf": path is a single GGUF file.
    """

    name: str
    kind: Literal["folder", "gguf"]
    path: Path


def local_source(name: str, path: Path) -> ModelSource:
    """The model at an existing path. Raises ModelSourceError if what is there is not a model."""
    if path.is_dir():
        weight_files(path)
        return ModelSource(name, "folder", path)
    if path.suffix.lower() != ".gguf":
        raise ModelSourceError(f"{path}: a model is a Hugging Face folder or a .gguf file")
    return ModelSource(name, "gguf", path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, by name.

    Raises ModelSourceError for a folder without config.json or without safetensors: pickled weights are never read."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelSourceError(f"{folder}: cannot be read ({error.strerror})") from error
    files = [folder / name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names:
        hint = f"; name the file itself: {folder / ggufs[0]}" if ggufs else ""
        raise ModelSourceError(f"{folder}: not a Hugging Face model folder, config.json is missing{hint}")
    if not files:
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickled:
            raise ModelSourceError(
                f"{folder}: has only pickled weights ({pickled[0]}), which can run code when read; "
                "convert them to safetensors"
            )
        raise ModelSourceError(f"{folder}: has no *.safetensors files")
    return files
