"""benchmarks/ceilings.py: floors against numbers worked out by hand for SmolLM2-135M; the probes of the extension."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ceilings_script", ROOT / "benchmarks" / "ceilings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ceilings = load_script()
SMOLLM2 = ceilings.ModelSize(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, inner=1536)
BF16, INT8, FOUR_BIT = ceilings.FORMATS
STEPS = {step.name: step for step in ceilings.STEPS}


def test_weights_of_smollm2() -> None:
    # q and o 2 * 576 * 576, k and v 2 * 192 * 576, MLP 3 * 576 * 1536; the head is the embedding.
    assert SMOLLM2.layer_weights == 663_552 + 221_184 + 2_654_208
    assert BF16.weight_bytes(SMOLLM2) == 2 * 134_479_872
    # A float32 scale for each of the 5,184 rows of a layer and the 49,152 rows of the head.
    assert INT8.weight_bytes(SMOLLM2) == 134_479_872 + 4 * (30 * 5_184 + 49_152)
    # The sums of the tensors' sizes in the GGUF file: Q4_1 in the layers, Q8_0 in the embedding.
    assert FOUR_BIT.weight_bytes(SMOLLM2) == 66_355_200 + 30_081_024


def test_kv_of_smollm2() -> None:
    assert BF16.kv_token_bytes(SMOLLM2) == 23_040  # 30 layers, K and V, 3 heads of 64 numbers of 2 bytes
    assert INT8.kv_token_bytes(SMOLLM2) == 12_240  # 3 heads of 64 bytes and a scale of 4


@pytest.mark.parametrize(
    ("step", "form", "moved"),
    [
        ("prefill 512", BF16, 268_959_744 + 11_796_480),
        ("decode, batch 1", BF16, 268_959_744 + 13_271_040),
        ("decode, batch 32", BF16, 268_959_744 + 424_673_280),
        ("decode, batch 32", INT8, 135_298_560 + 225_607_680),
        ("decode, batch 8", FOUR_BIT, 96_436_224 + 106_168_320),
    ],
)
def test_bytes_moved(step: str, form: Any, moved: int) -> None:
    assert STEPS[step].bytes_moved(SMOLLM2, form) == moved


def test_operations() -> None:
    prefill, decode = STEPS["prefill 512"], STEPS["decode, batch 32"]
    assert prefill.weight_operations(SMOLLM2) == 2 * (512 * 106_168_320 + 28_311_552)
    # 512 * 513 / 2 pairs of tokens, 30 layers of 9 heads of 64, two products of two operations each
    assert prefill.attention_operations(SMOLLM2) == 131_328 * 30 * 576 * 4
    assert decode.weight_operations(SMOLLM2) == 2 * 32 * 134_479_872
    assert decode.attention_operations(SMOLLM2) == 32 * 576 * 30 * 576 * 4


def test_the_slower_floor_binds() -> None:
    machine = ceilings.Ceilings(read={1 << 30: 25.0}, peak={"bf16": 500.0, "int8": 1000.0})
    decode = ceilings.floor(SMOLLM2, BF16, STEPS["decode, batch 1"], machine)
    assert decode["bound"] == "memory"
    assert decode["floor_ms"] == pytest.approx(282_230_784 / 25e9 * 1e3)
    assert decode["tokens_per_s"] == pytest.approx(88.6, abs=0.1)
    prefill = ceilings.floor(SMOLLM2, INT8, STEPS["prefill 512"], machine)
    assert prefill["bound"] == "compute"
    # 108.77 and 9.08 GOP at 1000 GOP/s; with KV in bf16, attention's at 500 GFLOP/s.
    assert prefill["floor_ms"] == pytest.approx(108.773 + 9.078, abs=0.01)
    prefill = ceilings.floor(SMOLLM2, FOUR_BIT, STEPS["prefill 512"], machine)
    assert prefill["floor_ms"] == pytest.approx(108.773 + 18.155, abs=0.01)


def test_batch_is_prefills_and_decode_steps() -> None:
    times = {"prefill 512": 100.0, "decode, batch 32": 10.0}
    floors = [{"format": "bf16", "step": step, "floor_ms": time} for step, time in times.items()]
    batch = ceilings.batch_floor(floors, BF16)
    assert batch["seconds"] == pytest.approx(3.2 + 1.27)
    assert batch["output_tokens_per_s"] == pytest.approx(4096 / 4.47)
    assert batch["total_tokens_per_s"] == pytest.approx(20480 / 4.47)


def test_bandwidth_between_measured_sizes() -> None:
    machine = ceilings.Ceilings(read={1 << 30: 20.0, 1 << 26: 40.0, 1 << 20: 100.0}, peak={})
    assert machine.bandwidth(1 << 31) == 20.0
    assert machine.bandwidth(1 << 30) == 20.0
    assert machine.bandwidth(1 << 28) == pytest.approx(30.0)  # half way from 2^26 to 2^30
    assert machine.bandwidth(1 << 26) == 40.0
    assert machine.bandwidth(1000) == 100.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/ceilings.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_floors_from_a_file(tmp_path: Path, tiny_llama_folder: Path) -> None:
    file = tmp_path / "machine.json"
    measured = {
        "machine": {"cpu": "a CPU", "threads": 2},
        "read_gb_s": {"2": {"1073741824": 25.0}},
        "peak_gop_s": {"2": {"bf16": 500.0, "int8": 1000.0}},
    }
    file.write_text(json.dumps(measured))
    done = run(str(tiny_llama_folder), "--from", str(file), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["floors"]) == 15
    assert [entry["format"] for entry in report["batch"]] == [form.name for form in ceilings.FORMATS]
    assert all(entry["floor_ms"] > 0 and entry["tokens_per_s"] > 0 for entry in report["floors"])


@pytest.mark.parametrize("text", ["[]", "{", '{"machine": {"threads": 2}}'])
def test_a_file_with_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="does not hold ceilings"):
        ceilings.read_ceilings(file)


def test_without_the_extension_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kllm.kernels.cpu._native", None)
    with pytest.raises(SystemExit, match=r"extension .* is missing"):
        ceilings.measure(1, 1, 0.001, Console(stderr=True))


def test_the_probes_measure_something() -> None:
    pytest.importorskip("kllm.kernels.cpu._native")
    measured = ceilings.measure(2, 1, 0.002, Console(stderr=True))
    for rates in (*measured["read_gb_s"].values(), *measured["peak_gop_s"].values()):
        assert all(rate > 0 for rate in rates.values())
    assert set(measured["read_gb_s"]) == {"1", "2"}
    assert all(measured["instructions"].values())


def test_the_probes_refuse_nonsense() -> None:
    native = pytest.importorskip("kllm.kernels.cpu._native")
    with pytest.raises(ValueError, match="kind must be"):
        native.dot_rate("fp4", 1, 0.01)
    with pytest.raises(ValueError, match="threads must be"):
        native.dot_rate("fp32", 0, 0.01)
    with pytest.raises(ValueError, match="seconds must be"):
        native.read_bandwidth(1 << 20, 1, 0.0)
    with pytest.raises(ValueError, match="at least 512"):
        native.read_bandwidth(100, 1, 0.01)
