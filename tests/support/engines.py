"""Engines for tests: a small config away from a running core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kllm.config import EngineConfig
from kllm.engine.loading import Engine, load_engine
from kllm.hub import resolve
from kllm.tokenization.tokenizer import load_tokenizer


def make_engine(model: Path | str, **options: Any) -> Engine:
    """options: fields of EngineConfig; one thread unless said otherwise. The caller closes engine.core."""
    config = EngineConfig(model=str(model), **{"threads": 1, **options})
    source = resolve(config.model, progress=False)
    return load_engine(config, source, load_tokenizer(source))
