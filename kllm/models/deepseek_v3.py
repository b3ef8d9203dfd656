"""deepseek_v3 (also Kimi-K2's text model): latent attention, dense layers first, then mixtures of experts."""

from __future__ import annotations

import torch

from kllm.kernels.operators import MlaForm
from kllm.models.layers.decoder import Attention, Decoder, FeedForward, dtype_name, read_decoder, read_dimensions
from kllm.models.layers.mla import read_mla, read_mla_shape
from kllm.models.layers.mlp import read_mlp
from kllm.models.layers.moe import read_moe, read_routing
from kllm.models.layers.rotary import RotaryTable, read_scaling
from kllm.models.layers.tensors import TensorReader
from kllm.models.model_config import ModelConfig
from kllm.models.weights.interface import WeightError


def load(config: ModelConfig, reader: TensorReader, mla_form: MlaForm = "auto") -> Decoder:
    """mla_form: how attention is computed, see Operators.mla_attention; the result is the same but for rounding.
    Layers for multi-token prediction are left out. Raises WeightError for a config or tensor that does not fit."""
    dims, shape, routing = read_dimensions(config), read_mla_shape(config), read_routing(config)
    inner, expert_inner = config.integer("intermediate_size"), config.integer("moe_intermediate_size")
    dense_layers = config.integer("first_k_dense_replace", 0, low=0)
    shared_experts = config.integer("n_shared_experts", 0, low=0)
    config.require("moe_layer_freq", (1,), 1)
    bias = config.boolean("attention_bias", False)
    scaling = read_scaling(config, shape.rope)
    scale = (shape.nope + shape.rope) ** -0.5 * scaling.softmax_factor

    def read_layer(prefix: str, index: int) -> tuple[Attention, FeedForward]:
        attention = read_mla(reader, f"{prefix}self_attn.", shape, bias=bias, scale=scale, form=mla_form)
        if index < dense_layers:
            return attention, read_mlp(reader, f"{prefix}mlp.", dims.hidden, inner)
        return attention, read_moe(reader, f"{prefix}mlp.", routing, dims.hidden, expert_inner, shared_experts)

    if reader.kv_dtype == torch.int8:
        raise WeightError("kv_cache_dtype int8 is for grouped-query attention, this model keeps latents")
    interleaved = config.boolean("rope_interleave", True)
    rotary = RotaryTable(scaling, reader.positions(dims.max_positions), reader.dtype, interleaved)
    return read_decoder(reader, dims, read_layer, rotary, shape.kv_group(dims.layers, dtype_name(reader.kv_dtype)))
