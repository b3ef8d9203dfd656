"""Fixtures shared by all tests. Helper packages under tests/ import as `support.…` (pythonpath in pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random llama (vocabulary 288, hidden 64, 4 layers, 512 positions) and a tokenizer.
    Read it, do not change it: all tests of the session share it."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
