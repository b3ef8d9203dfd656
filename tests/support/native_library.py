"""Headers of native/ compiled for one instruction set behind plain C names, for ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
_AVX512_BF16 = (*_AVX512, "avx512bf16")
INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "emulated_tiles": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "amx-tile", "amx-bf16", "amx-int8"),
}
_DEFINED = {"emulated_tiles": ["-DKLLM_EMULATED_TILES"]}


def _processor_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.replace("avx512_", "avx512").split())


def _parts(source: Path) -> Iterator[bytes]:
    yield source.read_bytes()
    for part in sorted((ROOT / "native").glob("*.h")) + sorted((ROOT / "native").glob("*.cpp")):
        yield part.read_bytes()


def compiled(source: Path, isa: str, folder: Path) -> ctypes.CDLL:
    """The library of `source` for an instruction set, built once per content in `folder`; skips where that can't be."""
    features = INSTRUCTION_SETS[isa]
    missing = {feature.replace("amx-", "amx_") for feature in features} - _processor_flags()
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    digest = hashlib.sha256(b"".join(_parts(source))).hexdigest()[:16]
    library = folder / f"{source.stem}-{isa}-{digest}.so"
    if not library.exists():
        command = [compiler, "-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared", f"-I{ROOT / 'native'}"]
        command += [f"-m{feature}" for feature in features]
        built = library.with_suffix(".new")
        command += _DEFINED.get(isa, [])
        subprocess.run([*command, f"-DKLLM_ISA={isa}", str(source), "-o", str(built)], check=True)
        built.replace(library)
    return ctypes.CDLL(str(library))
