"""llama (also SmolLM2): grouped-query attention, half-split rotary positions, gated MLP, biases optional."""

from __future__ import annotations

from kllm.models.layers.decoder import Attention, Decoder, FeedForward, dtype_name, read_decoder, read_dimensions
from kllm.models.layers.gqa import read_gqa, read_gqa_shape
from kllm.models.layers.mlp import read_mlp
from kllm.models.layers.rotary import RotaryTable, read_scaling
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig


def load(config: ModelConfig, reader: TensorReader) -> Decoder:
    """Raises WeightError for a config or tensor that does not fit."""
    dims, shape = read_dimensions(config), read_gqa_shape(config)
    inner = config.integer("intermediate_size")
    attention_bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    scaling = read_scaling(config, shape.head_dim)

    def read_layer(prefix: str, index: int) -> tuple[Attention, FeedForward]:
        attention = read_gqa(reader, f"{prefix}self_attn.", shape, bias=attention_bias, head_norms=False, eps=dims.eps)
        return attention, read_mlp(reader, f"{prefix}mlp.", dims.hidden, inner, mlp_bias)

    rotary = RotaryTable(scaling, reader.positions(dims.max_positions), reader.dtype, interleaved=False)
    return read_decoder(reader, dims, read_layer, rotary, shape.kv_group(dims.layers, dtype_name(reader.kv_dtype)))
