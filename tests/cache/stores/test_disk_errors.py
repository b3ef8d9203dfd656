"""DiskStore where the operator has to mend something: full disks, missing permissions, strange folders."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support.disk_stores import CAPACITY, PAGE, Pages, flip_bit, open_pages, segment_bytes, segments

from kllm.cache.stores.disk import DiskStore
from kllm.cache.stores.segment import HEADER_BYTES
from kllm.cache.stores.store import StoreError

RECORD = HEADER_BYTES + PAGE


def test_a_full_disk_is_an_error_and_reading_goes_on(tmp_path, monkeypatch):
    with open_pages(tmp_path) as pages:
        pages.put([1])
        real = os.pwritev

        def full(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset > 2 * RECORD:
                raise OSError(28, "No space left on device")
            return real(fd, buffers[:1], offset)  # writes less than it was given

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(StoreError, match="the disk is full"):
                pages.put(range(2, 10))
        assert pages.got(range(10)) == [1]
        assert segment_bytes(tmp_path) == RECORD  # what did not fit is given back
        assert pages.put(range(2, 10)) == 8
        assert pages.got(range(10)) == list(range(1, 10))


def put_in_tens(pages: Pages, first: int, end: int) -> None:
    for start in range(first, end, 10):
        pages.put(range(start, start + 10))


def test_files_that_may_not_grow(tmp_path):
    resource = pytest.importorskip("resource")
    with open_pages(tmp_path, segment_bytes=1 << 20) as pages:
        pages.put([1])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            with pytest.raises(StoreError, match="File too large"):
                put_in_tens(pages, 2, 200)
            assert pages.got([1]) == [1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert pages.put([500]) == 1


def test_an_index_that_is_full_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("kllm.cache.stores.disk.map_bytes", lambda capacity, page: 256 << 10)
    with open_pages(tmp_path, size=64) as pages:
        pages.put([1])
        with pytest.raises(StoreError, match="index is full"):
            pages.put(range(2, 5000))
        assert pages.got([1]) == [1]


@pytest.fixture
def unprivileged(monkeypatch):
    """A folder that this process owns, as a user whom permissions bind. Yields the folder."""
    folder = Path(tempfile.mkdtemp())
    nobody = 65534
    root = os.geteuid() == 0
    if root:
        os.chown(folder, nobody, nobody)
        os.seteuid(nobody)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o700)
        shutil.rmtree(folder)


def write_protect(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)


def test_a_folder_without_write_permission_is_read(unprivileged, caplog):
    with open_pages(unprivileged) as pages:
        pages.put([1, 2])
    write_protect(unprivileged)
    with open_pages(unprivileged) as pages:
        assert pages.store.read_only
        assert "reading only" in caplog.text
        assert pages.exists([1, 2, 3]) == 2
        assert pages.got([1, 2, 3]) == [1, 2]
        with pytest.raises(StoreError, match=r"can only be read: .* is not writable"):
            pages.put([3])
        with pytest.raises(StoreError, match="can only be read"):
            pages.run(pages.store.clear())


def test_damage_in_a_folder_without_write_permission_is_a_miss(unprivileged):
    with open_pages(unprivileged) as pages:
        pages.put([1, 2])
    flip_bit(segments(unprivileged)[0], 200)
    write_protect(unprivileged)
    with open_pages(unprivileged) as pages:
        assert pages.got([1, 2]) == [2]
        assert pages.store.counts.corrupt == 1


def test_a_folder_that_cannot_be_made_or_read(unprivileged):
    unprivileged.chmod(0o500)
    with pytest.raises(StoreError, match=r"store cannot be written: Permission denied"):
        DiskStore(unprivileged / "store", PAGE, CAPACITY)
    unprivileged.chmod(0)
    with pytest.raises(StoreError, match=r"Permission denied"):
        DiskStore(unprivileged / "store", PAGE, CAPACITY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"store": "kllm", "format": 99}), "has format 99, this version of kLLM knows format 1"),
        (json.dumps({"store": "other", "format": 1}), "says store 'other'"),
        ("{", "is damaged, or not of a kLLM store"),
        ("[" * 4000, "is damaged, or not of a kLLM store"),
    ],
)
def test_folders_of_other_versions_are_left_alone(tmp_path, content, message):
    (tmp_path / "STORE.json").write_text(content)
    with pytest.raises(StoreError, match=message):
        DiskStore(tmp_path, PAGE, CAPACITY)


def test_folders_with_other_things_in_them_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match=r"not empty \(it holds thesis.tex\)"):
        DiskStore(tmp_path, PAGE, CAPACITY)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(StoreError, match=r"thesis\.tex is not a folder"):
        DiskStore(tmp_path / "thesis.tex", PAGE, CAPACITY)


def test_an_index_that_is_rubbish_is_an_error(tmp_path):
    with open_pages(tmp_path) as pages:
        pages.put([1])
    (tmp_path / "index" / "data.mdb").write_bytes(b"rubbish" * 5000)
    with pytest.raises(StoreError, match="the index cannot be used"):
        DiskStore(tmp_path, PAGE, CAPACITY)
