"""qwen3: llama with an explicit head size and a norm over every query and key head before the rotation."""

from __future__ import annotations

from kllm.models.layers.decoder import Attention, Decoder, FeedForward, dtype_name, read_decoder, read_dimensions
from kllm.models.layers.gqa import read_gqa, read_gqa_shape
from kllm.models.layers.mlp import read_mlp
from kllm.models.layers.rotary import RotaryTable, read_scaling
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig

DEFAULT_HEAD_DIM = 128


def load(config: ModelConfig, reader: TensorReader) -> Decoder:
    """Raises WeightError for a config or tensor that does not fit, and for sliding windows."""
    config.require("use_sliding_window", (False,), False)
    dims, shape = read_dimensions(config), read_gqa_shape(config.with_default("head_dim", DEFAULT_HEAD_DIM))
    inner = config.integer("intermediate_size")
    bias = config.boolean("attention_bias", False)
    scaling = read_scaling(config, shape.head_dim)

    def read_layer(prefix: str, index: int) -> tuple[Attention, FeedForward]:
        attention = read_gqa(reader, f"{prefix}self_attn.", shape, bias=bias, head_norms=True, eps=dims.eps)
        return attention, read_mlp(reader, f"{prefix}mlp.", dims.hidden, inner)

    rotary = RotaryTable(scaling, reader.positions(dims.max_positions), reader.dtype, interleaved=False)
    return read_decoder(reader, dims, read_layer, rotary, shape.kv_group(dims.layers, dtype_name(reader.kv_dtype)))
