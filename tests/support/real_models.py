"""The real model that tests use, if this machine can get it."""

from __future__ import annotations

import pytest

from kllm.hub import ModelSource, ModelSourceError, resolve


def smollm2_or_skip() -> ModelSource:
    """SmolLM2-135M as a GGUF (from the cache, else downloaded: 93 MB); skips the test if it cannot be had."""
    try:
        source = resolve("smollm2", progress=False)
    except ModelSourceError as error:
        pytest.skip(f"smollm2 is not available: {error}")
    if source.kind != "gguf":
        pytest.skip("smollm2 was cached from the hub; these figures are for the GGUF")
    return source
