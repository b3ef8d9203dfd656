"""Dequantisation of GGUF tensor types, a cache-sized piece at a time.

A tensor is a row of blocks; a block is a few scales and packed integers. Layouts (bytes; every d, m is fp16):

    Q4_0   d | 16: low nibbles are elements 0..15, high ones 16..31          d (q - 8)
    Q4_1   d m | 16                                                          d q + m
    Q5_0   d | 4: fifth bits | 16                                            d (q - 16)
    Q5_1   d m | 4 | 16                                                      d q + m
    Q8_0   d | 32 signed                                                     d q
    Q4_K   d m | 12: 8 × (6-bit scale, 6-bit min) | 128: nibbles, 32 a run   (d s) q - (m t)
    Q5_K   d m | 12 | 32: fifth bits, one run per bit | 128                  (d s) q - (m t)
    Q6_K   128: low 4 bits | 64: high 2 bits | 16 signed scales | d          (d s) (q - 32)

All arithmetic is float32 in the order of the formula, so results equal ggml's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kllm.hub.gguf import TensorType

_PIECE = 1 << 17  # elements decoded at once: half a MiB of float32 stays in the second-level cache


def decode(raw: torch.Tensor, kind: TensorType, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """raw: uint8, the bytes of a tensor of this type and shape. Returns it in dtype, in memory of its own."""
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    plain = _PLAIN.get(kind.name)
    if plain is not None:
        flat.copy_(_view(raw, plain))
        return out
    decode_blocks = _DECODERS[kind.name]
    blocks, runs = raw.view(-1, kind.size), flat.view(-1, kind.block)
    step = _PIECE // kind.block
    scratch = None if dtype == torch.float32 else torch.empty(step, kind.block)
    for start in range(0, len(blocks), step):
        piece, target = blocks[start : start + step], runs[start : start + step]
        if scratch is None:
            decode_blocks(piece, target)
        else:
            values = scratch[: len(piece)]
            decode_blocks(piece, values)
            target.copy_(values)
    return out


def _view(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as another type, copied only if they are not aligned for it."""
    if raw.data_ptr() % dtype.itemsize or not raw.is_contiguous():
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The fp16 number at this byte of every block: float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """16 bytes to 32 numbers 0..15: low nibbles first."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _add_fifth_bits(bits: torch.Tensor, out: torch.Tensor) -> None:
    """Bit i of 4 bytes is worth 16 in element i. Bytes are little endian, so element i is bit i % 8 of byte i // 8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    high = (bits[:, :, None] >> shifts) & 1
    out.add_(high.view(-1, 32), alpha=16)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    _add_fifth_bits(blocks[:, 2:6], out)
    out.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    _add_fifth_bits(blocks[:, 4:8], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes to 8 scales and 8 mins of 6 bits, float32 [n, 8, 1].

    Bytes 0-3 and 4-7 hold scales and mins 0-3 in their low six bits; the low four bits of scales and mins 4-7 are
    the nibbles of bytes 8-11, their upper two the spare bits of bytes 0-3 and 4-7."""
    scale, least, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([scale & 63, (rest & 15) | ((scale >> 2) & 48)], dim=1)
    mins = torch.cat([least & 63, (rest >> 4) | ((least >> 2) & 48)], dim=1)
    return scales.float()[:, :, None], mins.float()[:, :, None]


def _runs_of_nibbles(packed: torch.Tensor, runs: torch.Tensor) -> None:
    """128 bytes to 8 runs of 32: bytes 32 i … 32 i + 31 hold run 2 i in the low and 2 i + 1 in the high nibbles."""
    packed = packed.reshape(-1, 4, 32)
    runs[:, 0::2] = packed & 15
    runs[:, 1::2] = packed >> 4


def _scale_k(blocks: torch.Tensor, runs: torch.Tensor) -> None:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales.mul_(_half(blocks, 0)[:, :, None])
    mins.mul_(_half(blocks, 2)[:, :, None])
    runs.mul_(scales).sub_(mins)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    runs = out.view(-1, 8, 32)
    _runs_of_nibbles(blocks[:, 16:], runs)
    _scale_k(blocks, runs)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    runs = out.view(-1, 8, 32)
    _runs_of_nibbles(blocks[:, 48:], runs)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    runs.add_((blocks[:, None, 16:48] >> shifts) & 1, alpha=16)
    _scale_k(blocks, runs)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Each half of 128 elements: 64 bytes of low bits (runs 0, 1 low nibble; 2, 3 high), 32 bytes of high bits."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    runs = out.view(-1, 2, 4, 32)
    runs.copy_((high & 3) << 4)
    runs[:, :, :2] += low & 15
    runs[:, :, 2:] += low >> 4
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    out.view(-1, 16, 16).sub_(32).mul_(scales[:, :, None])


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
