from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from support.native_attention import AttentionTask, RotateTask
from support.native_library import INSTRUCTION_SETS, compiled


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def attention_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    source = Path(__file__).parent / "attention_exports.cpp"
    library = compiled(source, request.param, request.config.cache.mkdir("native"))
    if request.param == "amx" and not library.may_use_tiles():
        pytest.skip("the system does not lend the registers of AMX")
    library.attention_scratch.restype = ctypes.c_size_t
    library.floats_of_part.restype = ctypes.c_size_t
    library.time_attention.restype = ctypes.c_double
    # A mirror without a field that the source has would be read past its end.
    assert library.bytes_of_attention_task() == ctypes.sizeof(AttentionTask)
    assert library.bytes_of_rotate_task() == ctypes.sizeof(RotateTask)
    return library
