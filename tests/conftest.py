"""Fixtures shared by all tests. Helper packages under tests/ import as `support.…` (pythonpath in pyproject.toml)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.live_server import LiveServer

# Tiny models are slower on several threads than on one, and many tests share few cores. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def transformers_reference() -> Callable[..., None]:
    """Runs tests/oracles/transformers_reference.py with these arguments in the oracle's virtual environment
    (KLLM_ORACLE_PYTHON, else .venv-oracle of the project); skips the test where there is none."""
    python = Path(os.environ.get("KLLM_ORACLE_PYTHON", ROOT / ".venv-oracle/bin/python"))
    if not python.exists():
        pytest.skip(f"no oracle: {python} does not exist (`make oracle`, or set KLLM_ORACLE_PYTHON)")
    script = ROOT / "tests/oracles/transformers_reference.py"

    def run(*arguments: str | Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run([python, script, *arguments], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random llama (vocabulary 288, hidden 64, 4 layers, 512 positions) and a tokenizer.
    Read it, do not change it: all tests of the session share it."""
    from support.tiny_models import write_tiny_llama  # imports torch, which most tests do not need

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def live_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 2 layers with 4096 positions, for `kllm serve`: quick, and long streams fit."""
    from support.tiny_models import write_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "live"
    return write_tiny_llama(folder, num_hidden_layers=2, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def live_server(live_model: Path) -> Iterator[LiveServer]:
    """A server process for tests that leave nothing running in it and do not kill its instance."""
    from support.live_server import LiveServer

    flags = ["--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", "--num-kv-blocks", "200"]
    flags += ["--max-queue", "24", "--max-body-bytes", "200000"]
    with LiveServer(live_model, *flags, api_key="secret") as server:
        yield server
