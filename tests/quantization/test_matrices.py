from __future__ import annotations

import gguf
import pytest
import torch

from kllm.kernels.linear import QuantizedRows
from kllm.quantization.matrices import FORMATS, dequantize, fits, quantize

BLOCKS = [format for format in FORMATS if format != "int8"]
STEPS = {"int8": 127, "q8_0": 127, "q4_0": 7.9, "q4_1": 7.4}  # between 0 and the largest magnitude


def randn(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def edges() -> torch.Tensor:
    """Blocks where rounding or ties decide: ties between extremes of both signs, exact halves, zeros, constants,
    values of one sign, magnitudes at both ends of fp16."""
    halves = torch.arange(32) / 2 - 8
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    rows = [signs, -signs, halves, halves.flip(0), torch.zeros(32), torch.full((32,), 3.7), torch.full((32,), -3.7)]
    rows += [torch.arange(32.0), -torch.arange(32.0), halves * 1e-6, halves * 1e-9, halves * 5e3]
    rows += [
        torch.arange(32) - 127.0,
        (torch.arange(32) * 8 + 0.5).clamp(max=127),
        0.49999997 * signs + 127 * (halves == 0),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_are_ggmls_byte_for_byte(format: str, dtype: torch.dtype) -> None:
    kind = gguf.GGMLQuantizationType[format.upper()]
    for matrix in (randn(700, 416, dtype), edges().to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)):
        expected = torch.from_numpy(gguf.quants.quantize(matrix.float().numpy(), kind))
        actual = quantize(matrix, format)
        assert (actual.format, actual.rows, actual.cols, actual.scales) == (format, *matrix.shape, None)
        assert torch.equal(actual.data, expected)
        back = torch.from_numpy(gguf.quants.dequantize(expected.numpy(), kind))
        assert torch.equal(dequantize(actual, torch.float32), back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(700, 416), (3, 33), (1, 200_000), (0, 64)])
def test_int8_by_its_definition(dtype: torch.dtype, rows: int, cols: int) -> None:
    matrix = randn(rows, cols, dtype)
    actual = quantize(matrix, "int8")
    assert actual.scales is not None
    scales = matrix.float().abs().amax(1) / 127
    assert torch.equal(actual.scales, scales)
    assert torch.equal(actual.data, (matrix.float() / scales[:, None]).round().to(torch.int8))
    assert torch.equal(dequantize(actual, torch.float32), actual.data * scales[:, None])


@pytest.mark.parametrize("format", FORMATS)
def test_values_come_back_within_half_a_step(format: str) -> None:
    matrix = randn(50, 64)
    quantized = quantize(matrix, format)
    back = dequantize(quantized, torch.float32)
    step = matrix.abs().amax() / STEPS[format]
    # The outermost step of q4_0 on the side without the extreme is cut off: up to a whole step there.
    assert (back - matrix).abs().amax() < step * (1.05 if format == "q4_0" else 0.55)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(quantized, dtype), back.to(dtype))


@pytest.mark.parametrize("format", BLOCKS)
def test_numbers_too_small_for_a_scale_become_zeros(format: str) -> None:
    back = dequantize(quantize(torch.full((1, 32), 1e-41) * torch.arange(-16, 16), format), torch.float32)
    assert back.count_nonzero() == 0


@pytest.mark.parametrize("format", FORMATS)
def test_strided_matrices(format: str) -> None:
    matrix = randn(64, 96)
    for view in (matrix.T, matrix[:, 32:], matrix[::2]):
        ours, plain = quantize(view, format), quantize(view.contiguous(), format)
        assert torch.equal(ours.data, plain.data)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(format: str, bad: float) -> None:
    matrix = randn(5, 64)
    matrix[3, 40] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(matrix, format)


@pytest.mark.parametrize("format", BLOCKS)
def test_values_too_large_for_half_precision_scales_are_refused(format: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        quantize(randn(5, 64) * 1e10, format)


def test_what_fits() -> None:
    assert fits("int8", 33)
    assert not any(fits(format, 33) or fits(format, 0) for format in BLOCKS)
    assert all(fits(format, 64) for format in FORMATS)


def test_any_gguf_block_can_be_read() -> None:
    data = torch.randint(0, 60, (4, 210), dtype=torch.uint8)
    kind = gguf.GGMLQuantizationType.Q6_K
    expected = torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind))
    assert torch.equal(dequantize(QuantizedRows("q6_k", 4, 256, data), torch.float32), expected)
