"""Number formats of weights: bytes per parameter, and the precision in which products run."""

from __future__ import annotations

from dataclasses import dataclass

from kllm.costs.errors import UnknownNameError

# A scale of 4 bytes per 128 x 128 block (fp8) or per row (int8) is below 1 % and left out; that of fp4 (one byte for
# 16 values, NVFP4) is an eighth.
BYTES_PER_PARAMETER = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5 + 1 / 16}

# A format that the processor has no instructions for is unpacked to the next that it has.
COMPUTED_IN = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "bf16"),
    "int8": ("int8", "bf16"),
    "fp4": ("fp4", "fp8", "int8", "bf16"),
}


@dataclass(frozen=True)
class WeightFormat:
    """Precision of each kind of matrix. `vocabulary`: embedding and head."""

    attention: str
    mlp: str
    experts: str
    vocabulary: str


# As checkpoints are published: fp8 ones keep embedding and head in bf16, fp4 ones keep attention in fp8 as well.
# int8 is kLLM's own, which quantises embedding and head too.
WEIGHT_FORMATS = {
    "bf16": WeightFormat("bf16", "bf16", "bf16", "bf16"),
    "fp8": WeightFormat("fp8", "fp8", "fp8", "bf16"),
    "int8": WeightFormat("int8", "int8", "int8", "int8"),
    "fp4": WeightFormat("fp8", "fp4", "fp4", "bf16"),
}


def find_weight_format(name: str) -> WeightFormat:
    """Raises UnknownNameError."""
    try:
        return WEIGHT_FORMATS[name.lower()]
    except KeyError:
        raise UnknownNameError("weight format", name, WEIGHT_FORMATS) from None
