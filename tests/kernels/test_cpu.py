"""What only the native operators have: packed blocks as shipped, a choice of instructions, a way out without them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.cpu_kernels import INSTRUCTION_SETS, need_instruction_set

from kllm.kernels.linear import QuantizedRows
from kllm.kernels.operators import Operators
from kllm.kernels.registry import get_operators, use_machine
from kllm.quantization.matrices import dequantize, quantize

FLOAT_TOLERANCE = 1e-5
INT8_TOLERANCE = 2e-2  # activations of N(0, 1) in 8 bits a group of 32, sums of 256 of them


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    need_instruction_set(request.param)
    use_machine(2, request.param)
    return str(request.param)


def super_blocks(kind: str, size: int, rows: int, cols: int, scales_at: tuple[int, ...]) -> QuantizedRows:
    """Random bytes, but for the fp16 scales at these offsets, which are small numbers."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (rows * cols // 256, size), generator=generator, dtype=torch.uint8)
    for offset in scales_at:
        scales = torch.rand(len(data), 1, generator=generator).mul_(1e-3).to(torch.float16)
        data[:, offset : offset + 2] = scales.view(torch.uint8)
    return QuantizedRows(kind, rows, cols, data.view(rows, -1))


def matrices() -> dict[str, QuantizedRows]:
    weights = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)) / 16
    return {
        **{kind: quantize(weights, kind) for kind in ("int8", "q8_0", "q4_0", "q4_1")},
        "q4_k": super_blocks("q4_k", 144, 50, 256, (0, 2)),
        "q6_k": super_blocks("q6_k", 210, 50, 256, (208,)),
    }


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("inner", [32, 40])
def test_rows_of_a_gated_matrix_come_in_order(instruction_set: str, inner: int, kind: str, activations: str) -> None:
    """Its panels lie gate by up. Experts and single MLPs take gate and up as they are."""
    gate, up = (torch.randn(inner, 64, generator=torch.Generator().manual_seed(i)) / 8 for i in range(2))
    parts = [gate, up] if kind == "float32" else [quantize(gate, kind), quantize(up, kind)]
    ops = get_operators("cpu", activations)  # type: ignore[arg-type]
    packed = ops.pack_linear(*parts, gated=True)
    for rows in (1, 9, 70):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))
        expected = torch.cat([ops.linear(x, ops.pack_linear(part)) for part in parts], 1)
        assert torch.equal(ops.linear(x, packed), expected)


@pytest.mark.parametrize("kind", matrices())
def test_quantised_weights_are_used_as_they_are(instruction_set: str, kind: str) -> None:
    matrix = matrices()[kind]
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2))
    expected = x.double() @ dequantize(matrix, torch.float32).double().T
    scale = expected.abs().max()
    for activations, tolerance in (("float", FLOAT_TOLERANCE), ("int8", INT8_TOLERANCE)):
        ops = get_operators("cpu", activations)  # type: ignore[arg-type]
        actual = ops.linear(x, ops.pack_linear(matrix))
        assert (actual - expected).abs().max() / scale < tolerance, activations
        alone = torch.cat([ops.linear(row[None], ops.pack_linear(matrix)) for row in x])
        assert torch.equal(alone, actual), activations


@pytest.mark.parametrize("kind", matrices())
def test_rows_are_looked_up_bit_for_bit(kind: str) -> None:
    need_instruction_set("avx2")
    ops, matrix = get_operators("cpu"), matrices()[kind]
    table = ops.pack_embedding(matrix, torch.float32, None)
    rows = torch.tensor([49, 0, 7, 49])
    assert torch.equal(ops.embedding(rows, table), dequantize(matrix, torch.float32)[rows])


def test_a_token_outside_the_table_is_an_error() -> None:
    need_instruction_set("avx2")
    ops: Operators = get_operators("cpu")
    table = ops.pack_embedding(matrices()["q8_0"], torch.float32, None)
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([50]), table)


def test_unknown_instructions_are_refused() -> None:
    need_instruction_set("avx2")
    with pytest.raises(ValueError, match="avx9"):
        use_machine(1, "avx9")


def test_without_the_extension_reference_is_used_and_one_line_says_so() -> None:
    """In a process of its own, where importing the extension fails as it does when it was not built."""
    program = (
        "import logging, sys\n"
        "logging.basicConfig(format='%(message)s')\n"
        "sys.modules['kllm.kernels.cpu._native'] = None\n"
        "from kllm.kernels.registry import get_operators\n"
        "print(get_operators('auto').name)\n"
        "try: get_operators('cpu')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    name, refusal = done.stdout.splitlines()
    assert name == "reference"
    assert "installed without its native operators" in refusal
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert "using the slower reference operators" in lines[0]
