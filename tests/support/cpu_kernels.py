"""Which of the native operators' instruction sets the tests can run here."""

from __future__ import annotations

import pytest

from kllm.kernels import cpu

INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2")


def need_instruction_set(name: str) -> None:
    """Skips the test where the extension was not built or the processor lacks the instructions."""
    if cpu.why_not() is not None:
        pytest.skip(f"no native operators: {cpu.why_not()}")
    from kllm.kernels.cpu import _native

    if name not in _native.instruction_sets():
        pytest.skip(f"this processor has no {name}")
