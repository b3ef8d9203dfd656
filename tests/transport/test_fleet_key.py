from __future__ import annotations

from pathlib import Path

import pytest

from kllm.transport.fleet_key import KeyFileError, key_from, read_key


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_same_file_gives_the_same_keys(tmp_path: Path) -> None:
    key = read_key(write(tmp_path / "key", "ab" * 32 + "\n"))
    assert key == key_from(bytes.fromhex("ab" * 32))
    assert key != key_from(bytes.fromhex("ac" * 32))
    assert len({key.instance.public, key.instance.secret, key.gateway.public, key.gateway.secret}) == 4


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_key(write(tmp_path / "key", "ab" * 32, 0o640))


@pytest.mark.parametrize("text", ["", "ab", "xy" * 32, "ab" * 33])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeyFileError, match="64 hexadecimal digits"):
        read_key(write(tmp_path / "key", text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key(tmp_path / "key")
