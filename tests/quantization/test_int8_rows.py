from __future__ import annotations

import pytest
import torch

from kllm.quantization.int8_rows import to_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_definition(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, scales = to_int8(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (5, 3))
    assert torch.equal(scales, x.float().abs().amax(-1) / 127)
    assert torch.equal(values.abs().amax(-1), torch.full((5, 3), 127, dtype=torch.int8))
    assert ((values * scales[..., None] - x.float()).abs() <= scales[..., None] * 0.5001).all()


def test_halves_go_to_the_even_step() -> None:
    values, scales = to_int8(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]]))
    assert scales.tolist() == [1.0]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def test_zeros_and_the_smallest_numbers() -> None:
    values, scales = to_int8(torch.tensor([[0.0, 0.0], [1e-45, 0.0], [-4e-43, 1e-43]]))
    assert values[:2].count_nonzero() == 0
    assert scales[:2].tolist() == [0.0, 0.0]
    assert values[2, 0] < 0 < values[2, 1]  # a scale this small is a rough one
    assert scales[2] > 0


def test_a_vector_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(1000, 7, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    values, scales = to_int8(x)
    for row in range(7):
        alone = to_int8(x[row : row + 1])
        assert torch.equal(values[row : row + 1], alone[0])
        assert torch.equal(scales[row : row + 1], alone[1])
