"""`kllm cache` as operators run it, on stores made here."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.disk_stores import FINGERPRINT, PAGE, flip_bit, key, open_pages, page, segments

from kllm.cache.stores.segment import HEADER_BYTES

RECORD = HEADER_BYTES + PAGE


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm.cli", "cache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture
def store(tmp_path) -> Path:
    """Six pages of one model and one of another, in two segments."""
    folder = tmp_path / "store"
    with open_pages(folder) as pages:
        pages.put(range(6))
    with open_pages(folder) as pages:
        other = [key(9, bytes(8))]
        assert asyncio.run(pages.store.put(other, [memoryview(page(9))])) == 1
    return folder


def test_inspect_says_what_is_there(store):
    result = run("inspect", store, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["pages"], found["bytes"], found["file_bytes"]) == (7, 7 * PAGE, 7 * RECORD)
    assert found["format"] == 1
    assert [segment["pages"] for segment in found["segments"]] == [6, 1]
    assert not any(segment["active"] for segment in found["segments"])
    first, second = found["fingerprints"]
    assert (first["fingerprint"], first["pages"], first["groups"]) == (FINGERPRINT.hex(), 6, [0])
    assert (second["fingerprint"], second["bytes"]) == ("00" * 8, PAGE)
    assert 0 <= found["newest_use_s"] <= found["oldest_use_s"] < 600


def test_inspect_of_a_store_in_use(store):
    with open_pages(store) as pages:
        pages.put([20])
        result = run("inspect", store)
        assert result.returncode == 0, result.stderr
        assert "8 pages, 32.0 KiB; 3 segments" in result.stdout
        assert FINGERPRINT.hex() in result.stdout
        assert "active" in result.stdout


def test_inspect_of_an_empty_store(tmp_path):
    with open_pages(tmp_path):
        pass
    result = run("inspect", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "0 pages" in result.stdout


def test_verify_of_a_sound_store(store):
    result = run("verify", store)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "7 pages checked, 28.0 KiB: 0 bad\n"
    assert result.stderr == ""


def test_verify_finds_damage_and_repairs_it(store):
    flip_bit(segments(store)[0], 2 * RECORD + 500)
    segments(store)[1].unlink()
    result = run("verify", store, "--json")
    assert result.returncode == 1
    assert "2 of 7 pages were bad; --repair forgets them" in result.stderr
    found = json.loads(result.stdout)
    assert [(bad["offset"], bad["reason"], bad["key"]) for bad in found["bad"]] == [
        (2 * RECORD, "wrong checksum", key(2).hex()),
        (0, "segment is missing", key(9, bytes(8)).hex()),
    ]
    repair = run("verify", store, "--repair")
    assert repair.returncode == 1
    assert "forgotten now" in repair.stderr
    assert f"at {2 * RECORD:,}: wrong checksum (key {key(2).hex()})" in repair.stdout
    again = run("verify", store)
    assert (again.returncode, again.stdout) == (0, "5 pages checked, 20.0 KiB: 0 bad\n")
    with open_pages(store) as pages:
        assert pages.got(range(6)) == [0, 1, 3, 4, 5]


def test_clear_asks_first(store):
    refused = run("clear", store)
    assert refused.returncode == 2
    assert "without a terminal give --yes" in refused.stderr
    result = run("clear", store, "--yes")
    assert (result.returncode, result.stdout) == (0, "7 pages forgotten\n")
    assert segments(store) == []
    assert json.loads(run("inspect", store, "--json").stdout)["pages"] == 0


def test_clear_of_a_store_in_use(store):
    with open_pages(store) as pages:
        pages.put([20])
        assert run("clear", store, "--yes").returncode == 0
        assert pages.got([0, 20]) == []
        assert pages.put([0]) == 1
        assert pages.got([0]) == [0]


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("inspect", "absent", "absent does not exist"),
        ("inspect", "notes.txt", "notes.txt is not a folder"),
        ("verify", ".", "is not a kLLM store: it has no STORE.json"),
        ("clear", ".", "is not a kLLM store: it has no STORE.json"),
    ],
)
def test_bad_paths_get_one_clear_line(command, name, message, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    result = run(command, tmp_path / name)
    assert result.returncode == 1
    assert result.stderr.startswith("kllm: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
