"""Weights from a GGUF file, under Hugging Face's names and in Hugging Face's layout."""

from __future__ import annotations

import mmap
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kllm.hub.gguf import GGUFFile, TensorInfo
from kllm.hub.gguf_config import translate_config
from kllm.kernels.linear import QuantizedRows
from kllm.models.weights.interface import WeightError
from kllm.quantization.block_decoders import decode

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_UNUSED = {"rope_freqs.weight"}  # translated into the config
_QUERY_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
_PERMUTED = ("llama",)  # architectures whose query and key rows llama.cpp reorders for its interleaved RoPE


def hugging_face_name(name: str) -> str | None:
    """blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; None for a name that has no counterpart."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"


class GGUFCheckpoint:
    """A Checkpoint over a mapped GGUF file: a tensor is dequantised when it is asked for, its pages then let go."""

    config: dict[str, Any]

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.config = translate_config(file)
        self.config_file = str(file.path)
        self.files: tuple[Path, ...] = (file.path,)
        self._tensors: dict[str, TensorInfo] = {}
        for name, info in file.tensors.items():
            translated = hugging_face_name(name)
            if translated is not None:
                self._tensors[translated] = info
            elif name not in _UNUSED:
                raise WeightError(f"{file.path}: tensor {name} is not part of architecture {self.config['model_type']}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mapping is read-only, and nothing here writes to it
            self._bytes = torch.frombuffer(file.data, dtype=torch.uint8)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._named(name).shape

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        info = self._find(name, shape)
        tensor = decode(self._raw(info), info.type, info.shape, dtype)
        self._let_go(info)
        return tensor

    def get_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedRows | None:
        info = self._find(name, shape)
        if info.type.block == 1 or shape[1] % info.type.block:
            return None
        data = self._raw(info).clone().view(shape[0], -1)
        self._let_go(info)
        return QuantizedRows(info.type.name.lower(), shape[0], shape[1], data)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._named(name)
        if info.shape != tuple(shape):
            raise WeightError(
                f"{self._file.path}: tensor {name} ({info.name}) has shape {list(info.shape)}, expected {list(shape)}"
            )
        return info

    def _named(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise WeightError(f"{self._file.path}: tensor {name} is missing")
        return info

    def _raw(self, info: TensorInfo) -> torch.Tensor:
        """The tensor's bytes, uint8, rows in Hugging Face's order."""
        raw = self._bytes[info.start : info.end]
        if self.config["model_type"] in _PERMUTED and (match := _QUERY_KEY.fullmatch(info.name)) is not None:
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            raw = self._halves_from_pairs(raw, info, heads)
        return raw

    def _halves_from_pairs(self, raw: torch.Tensor, info: TensorInfo, heads: int) -> torch.Tensor:
        """Undo llama.cpp's row order. A head's rows lie there as 0, d/2, 1, d/2 + 1, … so that RoPE turns neighbours;
        here RoPE turns row i with row i + d/2. Rows are whole runs of blocks, so the bytes can be moved as they are."""
        rows = info.shape[0]
        if rows % (2 * heads):
            raise WeightError(f"{self._file.path}: tensor {info.name} has {rows} rows for {heads} heads")
        pairs = raw.view(heads, rows // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(-1)

    def _let_go(self, info: TensorInfo) -> None:
        """Drop the tensor's file pages from this process, so that loading needs no memory beside the result."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._file.data.madvise(mmap.MADV_DONTNEED, start, info.end - start)
