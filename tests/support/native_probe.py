"""Compiling a C++ file of tests together with the sources of native/, once per instruction set, and loading it."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
_CPU_FLAGS = {"avx2": "avx2", "avx512": "avx512_vnni", "avx512_bf16": "avx512_bf16", "amx": "amx_int8"}
# As in CMakeLists.txt; gcc 12's own headers of AVX-512 set off the warning.
_OPTIONS = ("-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wno-maybe-uninitialized", "-fPIC", "-shared")


def load_probe(config: pytest.Config, source: Path, others: Sequence[str], isa: str) -> ctypes.CDLL:
    """The library made of `source` and native/`others` for this instruction set, from the cache of the last run if
    nothing has changed. Skips the test where there is no compiler or the processor lacks the instructions."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("the native kernels are for x86-64 Linux")
    if _CPU_FLAGS[isa] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {isa}")
    command = [compiler, *_OPTIONS, *FLAGS[isa], f"-DKLLM_ISA={isa}", f"-I{NATIVE}", str(source)]
    command += [str(NATIVE / name) for name in others]
    digest = hashlib.sha256(" ".join(command).encode())
    parts = [*sorted(source.parent.glob("*.cpp")), *sorted(NATIVE.glob("*.h")), *(NATIVE / name for name in others)]
    for path in parts:
        digest.update(path.read_bytes())
    library = Path(config.cache.mkdir("native")) / f"{source.stem}_{isa}_{digest.hexdigest()[:16]}.so"
    if not library.exists():
        for old in library.parent.glob(f"{source.stem}_{isa}_*.so"):
            old.unlink()
        part = library.with_suffix(".part")
        built = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        part.rename(library)
    return ctypes.CDLL(str(library))
