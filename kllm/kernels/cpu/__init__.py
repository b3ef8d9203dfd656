"""Operators over the native extension (sources in native/): AMX, AVX-512 with bfloat16, AVX-512 or AVX2."""

from __future__ import annotations


def why_not() -> str | None:
    """None if the native operators can run here, else the reason in words."""
    try:
        from kllm.kernels.cpu import _native
    except ImportError:
        return "kLLM was installed without its native operators (no C++ compiler or Python headers at that time)"
    if not _native.instruction_sets():
        return "the processor has no AVX2"
    return None
