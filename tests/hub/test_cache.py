from __future__ import annotations

from pathlib import Path

import pytest

from kllm.hub.cache import ModelCache, Record, models_folder, quantized_folder
from kllm.hub.source import ModelSource, ModelSourceError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ModelCache("org/name")


def test_place_follows_xdg(tmp_path, monkeypatch, cache):
    assert cache.folder == tmp_path / "kllm" / "models" / "org--name"
    assert quantized_folder() == tmp_path / "kllm" / "quantized"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert models_folder() == tmp_path / "home" / ".cache" / "kllm" / "models"


def test_what_is_written_is_found(cache):
    with cache.locked() as partial:
        assert partial.parent == cache.folder
        (cache.folder / "m.gguf").write_bytes(b"12345")
        written = cache.write(Record("gguf", "m.gguf", "wheel", 5))
    assert written == cache.find() == ModelSource("org/name", "gguf", cache.folder / "m.gguf")
    assert not list(cache.folder.glob("partial-*"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"kind": "pickle", "path": "/", "origin": "wheel"}',
        '{"kind": "gguf", "path": "x", "origin": "hub"}',
    ],
)
def test_an_illegible_or_stale_record_counts_as_nothing_cached(cache, content):
    assert cache.find() is None
    cache.folder.mkdir(parents=True)
    (cache.folder / "source.json").write_text(content)
    assert cache.find() is None


def test_publishing_what_is_not_there_is_an_error(cache):
    with cache.locked(), pytest.raises(ModelSourceError, match="vanished"):
        cache.write(Record("gguf", "m.gguf", "wheel", 5))
